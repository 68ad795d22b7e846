"""A stream of synthetic prompts: all come once, the queue stays bounded, memory is looked at."""

from pathlib import Path

from dflash.bench.stream import StreamOptions, lines, stream


def test_every_prompt_comes_once_through_a_bounded_queue(tmp_path: Path) -> None:
    result = stream(StreamOptions(prompts=3000, targets=3, depth=2, row_tokens=256), tmp_path / "store")
    assert (result.lost, result.repeated) == (0, 0)
    assert 1 <= result.peak_queue <= 2
    assert result.batches >= 3000 * 36 // 256 * 0.9
    assert "0 lost, 0 repeated" in lines(result)
