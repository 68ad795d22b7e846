"""A warm compiled call: `race` while another thread traces, `clean` after a trace, `same` inside its own trace.

`stuck`: after two traces that ended in the order of their beginning; `stuck-b`: after a trace and an eager higher-order
operator that did.
"""

import sys
import threading

import attention_module
import torch
import torch._higher_order_ops.utils as higher_order
from torch.fx.experimental.proxy_tensor import make_fx

inside, leave = threading.Event(), threading.Event()
x = torch.ones(2)


def traced(y):
    inside.set()
    leave.wait(20)
    return y + 1


def call():
    try:
        print("call returned", attention_module.attention(x).tolist())
    except RuntimeError as error:
        print("call raised", str(error)[:40])


def in_thread(name, body):
    thread = threading.Thread(target=body, name=name)
    thread.start()
    return thread


def overlap_traces():
    second_inside, second_leave = threading.Event(), threading.Event()

    def second(y):
        second_inside.set()
        second_leave.wait(20)
        return y + 1

    first_thread = in_thread("first", lambda: torch.fx.symbolic_trace(traced))
    inside.wait(20)
    second_thread = in_thread("second", lambda: torch.fx.symbolic_trace(second))
    second_inside.wait(20)
    leave.set()
    first_thread.join()
    second_leave.set()
    second_thread.join()


def overlap_with_higher_order():
    """The environment of an uncompiled higher-order operator begins inside another thread's trace and ends after it."""
    entered, ended = threading.Event(), threading.Event()

    def operate():
        with higher_order._set_compilation_env():
            entered.set()
            ended.wait(20)

    first_thread = in_thread("first", lambda: torch.fx.symbolic_trace(traced))
    inside.wait(20)
    operator = in_thread("operator", operate)
    entered.wait(20)
    leave.set()
    first_thread.join()
    ended.set()
    operator.join()


attention_module.attention(x)
mode = sys.argv[1]
if mode == "race":
    tracer = in_thread("tracer", lambda: make_fx(traced)(x))
    inside.wait(20)
    in_thread("caller", call).join()
    leave.set()
    tracer.join()
elif mode == "clean":
    leave.set()
    make_fx(traced)(x)
    in_thread("caller", call).join()
elif mode == "same":
    make_fx(lambda y: call() or y + 1)(x)
elif mode == "stuck-b":
    overlap_with_higher_order()
    in_thread("caller", call).join()
elif mode == "stuck":
    overlap_traces()
    in_thread("caller", call).join()
