"""`dflash train`: builds the parts, then the loop: batches -> step -> evaluation and checkpoint when due -> the end."""

import os
import signal
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from dflash import checkpoint, run_directory
from dflash.config import TrainConfig
from dflash.data.rows import batches_per_epoch
from dflash.drafter.model import DFlashDrafter
from dflash.errors import Diverged, Stopped
from dflash.evaluate import evaluate
from dflash.log import RunLog, StepLine
from dflash.loggers import Loggers, check_loggers, open_loggers
from dflash.metrics_file import MetricsFile, cut_after
from dflash.outcome import counted, finish, header
from dflash.parts import Parts, build, check_features, open_features, settled
from dflash.pipeline.assemble import assemble
from dflash.pipeline.order import Order
from dflash.pipeline.placement import layout
from dflash.pipeline.provenance import provenance
from dflash.pipeline.ranks import Ranks, joined
from dflash.pipeline.replicas import beside_target, unsplit
from dflash.pipeline.watchdog import Watchdog
from dflash.progress import Progress, pack, seeded, unpack
from dflash.run_directory import RunDirectory
from dflash.signals import EvaluationAbandoned, StopRequest, stop_on_signals
from dflash.step import Stepper, StepResult
from dflash.warm_up import late_compiles, warm_up

# steps in a row without a single valid anchor, after which the data cannot be right
MAX_EMPTY_STEPS = 100


def train(config: TrainConfig, log: RunLog | None = None) -> int:
    """Runs or resumes a training; returns 0. Every failure is a DflashError; Stopped carries 128 + the signal."""
    with joined() as ranks, stop_on_signals() as signals, seeded(config.seed), ExitStack() as held:
        log = log or RunLog(quiet=config.quiet or not ranks.first)
        config = settled(config, ranks.size)
        run = run_directory.check(config)
        check_loggers(config.loggers)
        if ranks.first and run.path.is_dir():
            held.enter_context(run_directory.alone(run))
        parts = build(config)
        log.header(header(config, parts))
        check_features(config, parts, run)
        # read before anything is written: a run that cannot be resumed stays as it is
        resumed = progress_of(run, parts) if config.resume else None
        ranks.wait()  # every rank has found its options good: the first may write
        if ranks.first:
            if not run.path.is_dir():
                held.enter_context(run_directory.alone(run))
            run_directory.create(run, config)
        ranks.wait()
        training = Training(config, parts, run, log, signals, ranks)
        if resumed is not None:
            training.restore(resumed)
        try:
            training.loop()
        finally:
            training.stepper.source.close()
        whole = unsplit(parts)
        if ranks.first:
            finish(config, whole, run, log, training.guard)
        training.stop_if_asked(signals)
    return 0


class Training:
    """The state of one run and THE loop."""

    def __init__(
        self, config: TrainConfig, parts: Parts, run: RunDirectory, log: RunLog, signals: StopRequest, ranks: Ranks
    ) -> None:
        """Counts the steps of the run; starts at step 0."""
        self.config, self.parts, self.run, self.log = config, parts, run, log
        self.signals, self.ranks = signals, ranks
        # what all ranks have agreed on; `signals` is what this one has got
        self.stop = StopRequest()
        self.progress = Progress()
        self.total_steps = total_steps(config, parts)
        self.order = Order(parts.store, config.data, config.seed)
        self.layout = layout(config.optim.accumulate, len(parts.placement.drafters), ranks.rank, ranks.size)
        # the backward pass of a split drafter sums the gradients itself
        merge = ranks.merge_counts if config.shard else ranks.merge
        self.stepper = Stepper(config, parts, open_features(config, parts, run), self.total_steps, merge)
        self.watchdog = Watchdog(config.watchdog, run.stacks(ranks.rank), self.fail)
        self.engine = assemble(self.stepper, self.layout, self.watchdog.beat)

    def restore(self, progress: Progress) -> None:
        """Goes on from `progress`; what was logged after it is dropped."""
        self.progress = progress
        if self.ranks.first:
            cut_after(self.run.metrics, progress.step)
        self.log.line(f"resumed at step {progress.step} from {checkpoint.newest(self.run.checkpoints)}")

    def loop(self) -> None:
        """Trains to the last step; evaluates, saves and stops where it should."""
        progress = self.progress
        with (
            self.log.live(self.total_steps, progress.step),
            self.records() as self.metrics,
            self.parts.attention.strategy.thread_scope(),
            self.watchdog,
        ):
            self.compile_ahead()
            self.catch_up()
            stream = self.order.stream(progress.epoch, progress.index, self.layout)
            with self.engine.running(stream, progress.step, self.total_steps):
                while progress.step < self.total_steps:
                    self.account(self.engine.step(progress.step))
                    self.evaluate_and_save()
            self.note_late_compiles()

    def records(self) -> AbstractContextManager[Loggers | MetricsFile]:
        """Where the run's records go: of all ranks, one writes."""
        if self.ranks.first:
            return open_loggers(self.config.loggers, self.run, asdict(self.config), self.log)
        return MetricsFile(Path(os.devnull))

    def fail(self, error: BaseException) -> None:
        """Ends the run with `error`; called by the watchdog's thread."""
        self.engine.fail(error)

    def compile_ahead(self) -> None:
        """The warm-up of every drafter, unless it is switched off or nothing is compiled."""
        for stepper in self.engine.steppers if self.config.warm_up else ():
            compiled = warm_up(stepper, lambda d, n: self.log.part("compile", d, n))
            self.watchdog.beat("warm-up")
            if compiled is not None:
                self.log.line(str(compiled))

    def note_late_compiles(self) -> None:
        """What was compiled during the run after all, and why."""
        for late in late_compiles(self.parts.attention.strategy):
            self.metrics.write("late_compile", self.progress.step, {"thread": late.thread, "reason": late.reason})
            self.log.line(f"compiled during the run, in {late.thread}: {late.reason}")

    def account(self, result: StepResult) -> None:
        """Moves on by one step: position, counters, the step's line. Diverged when it cannot go on."""
        progress = self.progress
        before = (progress.epoch, progress.index)
        progress.step += 1
        progress.epoch, progress.index = self.order.after(*before, self.config.optim.accumulate)
        progress.tokens += result.tokens
        progress.empty_batches += result.empty
        if result.metrics is None:
            self.skip_empty()
        elif not result.applied:
            self.skip_nonfinite(result, before)
        else:
            progress.nonfinite_in_a_row = progress.empty_in_a_row = 0
            line = step_line(progress, result)
            self.metrics.write("step", progress.step, {k: v for k, v in asdict(line).items() if k != "step"})
            self.note_flow()

    def note_flow(self) -> None:
        """How full the queue is and who waits for whom; nothing when one thread does everything."""
        flow = self.engine.flow()
        if flow is None:
            return
        for death in flow.restarted:
            self.log.line(f"restarted after {death}")
        self.metrics.write("flow", self.progress.step, {**asdict(flow), "bottleneck": flow.bottleneck})

    def skip_empty(self) -> None:
        """Nothing in this step could be trained on."""
        self.progress.empty_in_a_row += 1
        self.metrics.write("skip", self.progress.step, {"reason": "no valid anchor"})
        if self.progress.empty_in_a_row >= MAX_EMPTY_STEPS:
            size = self.parts.drafter.block_size
            raise Diverged(
                f"{MAX_EMPTY_STEPS} steps in a row had no answer of {size} tokens or more to draw a block from; "
                "lower --drafter.block-size or train on longer answers"
            )

    def skip_nonfinite(self, result: StepResult, position: tuple[int, int]) -> None:
        """The weights stay as they were; a few such steps are survived, many in a row are not.

        position: of the step's first micro-batch.
        """
        progress, limit = self.progress, self.config.optim.max_nonfinite
        progress.nonfinite += 1
        progress.nonfinite_in_a_row += 1
        assert result.metrics is not None
        loss = float(result.metrics.loss)
        self.metrics.write("skip", progress.step, {"reason": "not finite", "loss": repr(loss)})
        if progress.nonfinite_in_a_row >= limit:
            cause = self.cause(position)
            raise Diverged(
                f"step {progress.step}: loss {loss} or its gradient was not finite {limit} times in a row: {cause}; "
                f"lower --optim.lr (now {self.config.optim.lr}) and go on with --resume"
            )

    def cause(self, position: tuple[int, int]) -> str:
        """Where the step that began at `position` got a number that is not finite."""
        if self.config.shard:
            return "where it came from is not looked for with --shard"
        return provenance(self.stepper, list(islice(self.order.stream(*position, self.layout), len(self.layout.own))))

    def catch_up(self) -> None:
        """An evaluation that a stop cut short, and a stop that came while the parts were built."""
        pending = self.progress.step > 0 and self.progress.evaluated_step != self.progress.step
        self.agree()
        if self.stop or (pending and self.is_due(self.config.eval.every)):
            self.evaluate_and_save()

    def evaluate_and_save(self) -> None:
        """Whatever is due at this step; a stop that was asked for saves first, then raises Stopped."""
        self.agree()
        improved = False
        if self.is_due(self.config.eval.every) and not self.stop:
            drafter = beside_target(self.parts)
            with self.watchdog.asleep() if not self.ranks.first else nullcontext():
                improved = self.ranks.any(self.ranks.first and self.evaluate(drafter))
                self.agree()
        if improved or self.is_due(self.config.save_every) or self.stop:
            self.save()
        self.stop_if_asked(self.stop)

    def agree(self) -> None:
        """A stop that any rank has been asked for becomes a stop of all, at the same step."""
        if self.ranks.any(bool(self.signals)):
            self.stop.signal_number = self.signals.signal_number or signal.SIGTERM

    def is_due(self, every: int) -> bool:
        """At every multiple of `every` steps (0: never) and at the last step."""
        step = self.progress.step
        return step == self.total_steps or (every > 0 and step % every == 0)

    def evaluate(self, drafter: DFlashDrafter) -> bool:
        """Speculative decoding on some held-out prompts; true when tau is the best so far."""
        progress, options = self.progress, self.config.eval
        if progress.evaluated_step == progress.step:
            return False
        prompts = self.parts.prompts[: options.prompts]
        try:
            measured = evaluate(
                self.parts.target, drafter, prompts, options.max_new_tokens, self.guard, baseline=False
            )
        except EvaluationAbandoned:
            return False
        progress.evaluated_step = progress.step
        # of equals the later one is kept: it has seen more
        better = progress.best_tau is None or measured.tau >= progress.best_tau
        mark = "  (best)" if better else ""
        if measured.tau == progress.best_tau:
            mark = f"  (best, as at step {progress.best_step}: of equals the later is kept)"
        if better:
            progress.best_tau, progress.best_step = measured.tau, progress.step
        self.metrics.write("eval", progress.step, {**asdict(measured), "best": better})
        over = counted(len(prompts), "prompt")
        self.log.line(f"step {progress.step}  held-out tau {measured.tau:.3f} over {over}{mark}")
        return better

    def guard(self, done: int, total: int) -> None:
        """Called within long evaluations: shows how far they are, and ends them when a stop was asked for."""
        self.log.part("evaluate", done, total)
        self.watchdog.beat("evaluation")
        self.engine.check()
        if self.signals:
            raise EvaluationAbandoned

    def save(self) -> None:
        """A checkpoint of this step, unless it is there already."""
        progress = self.progress
        self.log.stage("save")
        if self.ranks.first:
            self.metrics.sync()
        content = pack(self.config, self.parts, progress)
        if self.ranks.first:
            checkpoint.save(self.run.checkpoints, progress.step, content)
            checkpoint.prune(self.run.checkpoints, self.config.keep, progress.best_step)
        self.watchdog.beat("save")

    def stop_if_asked(self, request: StopRequest) -> None:
        """Raises Stopped with the line that says how to go on."""
        if request.signal_number is not None:
            done, total = self.progress.step, self.total_steps
            place = f"at step {done} of {total}" if done < total else (
                f"after the last step ({done} of {total}): training is done, the final measurement is pending"
            )
            message = (
                f"stopped by {signal.Signals(request.signal_number).name} {place}; "
                f"go on with: dflash train --resume --output {self.run.path}"
            )
            raise Stopped(message, request.signal_number)


def progress_of(run: RunDirectory, parts: Parts) -> Progress:
    """The newest checkpoint, put into the parts. CheckpointError: none, damaged, or of something else."""
    newest = checkpoint.newest(run.checkpoints)
    return unpack(checkpoint.load(newest), parts, str(newest))


def total_steps(config: TrainConfig, parts: Parts) -> int:
    """Optimizer steps of the run: as asked, or as many whole ones as the epochs' micro-batches give."""
    if config.steps is not None:
        return config.steps
    epochs = range(config.optim.epochs)
    count = sum(batches_per_epoch(parts.store, config.data, config.seed, epoch) for epoch in epochs)
    return max(1, count // config.optim.micro_batches)


def step_line(progress: Progress, result: StepResult) -> StepLine:
    """What is shown and logged of one step."""
    metrics = result.metrics
    assert metrics is not None
    return StepLine(
        step=progress.step,
        epoch=progress.epoch,
        loss=float(metrics.loss),
        accuracy=float(metrics.accuracy),
        tau=float(metrics.tau),
        learning_rate=result.learning_rate,
        grad_norm=result.grad_norm,
        anchors=int(metrics.blocks),
        tokens=result.tokens,
        step_ms=result.seconds * 1e3,
        tok_s=result.tokens / result.seconds,
        conditional_acceptance=tuple(round(share, 4) for share in metrics.conditional_acceptance.tolist()),
    )
