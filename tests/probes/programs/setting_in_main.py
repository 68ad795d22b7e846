"""A setting made in main and read in a worker; `in-worker`: the worker makes it, too."""

import sys
import threading

import torch._dynamo.config as config

config.recompile_limit = 77


def body():
    if sys.argv[1] == "in-worker":
        config.recompile_limit = 77
    print("worker sees", config.recompile_limit)


thread = threading.Thread(target=body, name="worker")
thread.start()
thread.join()
