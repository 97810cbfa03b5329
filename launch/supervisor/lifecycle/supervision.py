"""Starts the three processes of a run in order and watches them. One that dies is replaced if `--restarts` allows it; else all of
them end, and their shared memory goes.

One thread, which sleeps in poll(2) on pidfds and signals. The processes notice our death by a pipe whose write end only
this process holds.
"""

import os
import select
import signal
import time

from ..shared import machine
from ..shared.failpoints import failpoint
from ..shared.paths import EXECUTOR, LOADER, PLANNER
from ..shared.trouble import CANNOT_START, DONE, INTERRUPTED, UNPACKABLE, say
from . import loaders, processes, segments
from .children import Child, reason
from .moments import Moments
from .restarts import Restarts
from .watchdog import Watchdog

_LOOK = 0.01  # seconds between two checks whether the loader answers
_GATHER = 0.5  # seconds in which other processes may end, too, and give their reasons
_FINISH = 27.0  # from the first SIGINT or SIGTERM: "end within 30 s"
_PLANNER_FOLLOWS = 20.0  # seconds after its executor has ended: the output may have to be copied
_POLITE_END = 5.0  # seconds for the others, once the planner has ended
_QUICK_END = 0.4  # likewise where the output is written and they hold much memory, which they give back without us
_MUCH = 128 << 20  # bytes


class DeathPipe:
    """Children hold the read end. It reads as end of file once the supervisor has ended."""

    def __init__(self):
        self.read_end, self._write_end = os.pipe2(os.O_CLOEXEC)

    def tell(self):
        """Closes the write end. The children then act as if the supervisor had ended: none waits for another."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def close(self):
        self.tell()
        os.close(self.read_end)


class Outcome:
    def __init__(self, code, sentence=""):
        self.code = code
        self.sentence = sentence


class Supervision:
    """`arguments`: of each program, and the paths. `loader`: one that outlives the run, or None to start the run's own."""

    def __init__(self, arguments, interrupts, line, loader=None):
        self._arguments = arguments
        self._interrupts = interrupts
        self._line = line
        self._death_pipe = DeathPipe()
        self._kept = loader
        self._children = []
        self._beside = []  # processes that a run of another kind has besides
        self._control = segments.ControlView(arguments.run_id)
        self._watchdog = Watchdog(arguments.stall_timeout)
        self._restarts = Restarts(arguments.directory, arguments.restarts)
        self._oom_kills = machine.oom_kills()
        self._deadline = None
        self._alone_since = None
        self._killed_at_once = False
        self.moments = Moments()
        self._planner_goes_on = False  # the next one, after another of this run
        self._told_by_loaders = set()  # the lines

    # ---- the run

    def run(self):
        """Runs until a process has ended that is not replaced, or the run is interrupted. Returns why."""
        try:
            outcome = self._run()
            self.moments.note("planner_ended")
        finally:
            self._end_all()
            self.moments.note("ended")
        # The planner may have finished the output while the others were being ended. Then the run is done.
        return Outcome(DONE) if self._output_is_written(self._children) else outcome

    @staticmethod
    def _output_is_written(children):
        return any(child.name == PLANNER and child.returncode() == 0 for child in children)

    def _run(self):
        self.moments.note("loader")
        if self._kept:
            self._children.append(self._kept)
        else:
            self._start(LOADER, self._arguments.loader_arguments())
        while True:
            self._sleep(self._line.wait() if self._has(PLANNER) else _LOOK)
            if len(self._children) == 3:
                failpoint("supervisor.steady")
            outcome = self._obey_interrupts() or self._attend()
            if outcome:
                return outcome
            ended = self._ended()
            self._relay()
            if ended and not self._replaced(ended) and not self._starts_over_plain():
                return self._conclude(ended)
            if not self._has(PLANNER):
                self._start_others()
            if self._interrupts.asked() and not self._deadline:
                self._restarts.begin(self._children)
            self._restarts.hurry()
            if self._line.due() and not self._deadline:
                self._line.show(self._arguments.progress_text(self._control))
            stillness = self._watchdog.look(self._words(), self._children)
            if stillness and not self._end_hung(stillness):
                return Outcome(INTERRUPTED, stillness.sentence)

    def _has(self, name):
        return any(child.name == name for child in self._children)

    def _start_others(self):
        """Planner and executor, once the loader answers and knows the model. It takes seconds until a GPU is ready: an executor for one
        begins as soon as there is a control segment, while weights are loaded."""
        if not self._has(EXECUTOR) and self._arguments.for_a_gpu() and self._control.ready():
            self._start(EXECUTOR, self._arguments.executor_arguments())
        if self._loader_is_ready():
            self._start(PLANNER, self._arguments.planner_arguments(takes_over=self._planner_goes_on))
            failpoint("supervisor.half_started")
            if not self._has(EXECUTOR):
                self._start(EXECUTOR, self._arguments.executor_arguments())
            self.moments.note("processes")

    def _attend(self):
        """What else a run of another kind looks after; an Outcome ends it."""
        return None

    def _start(self, name, arguments):
        self._children.append(self._child(name, arguments))

    def _child(self, name, arguments):
        return Child(name, arguments, self._death_pipe.read_end, inherited=self._arguments.inherited_locks())

    def _replaced(self, ended):
        """Replaces the processes that ended, if all of them may be replaced; returns whether it did."""
        old = [] if self._deadline else self._restarts.replaceable(ended, self._is_searching())
        if any(child.name == LOADER for child in old) and not self._control.was_sealed:
            old = [self._begin_anew()]
        for child in old:
            self._replace(child)
        if old:
            self._watchdog.begin_again()
        return bool(old)

    def _starts_over_plain(self):
        """Begins the run anew without packing if the loader found that its weights cannot be packed; returns whether it did. Nothing has
        been computed by then, and nothing counts as a restart. A process that lost this loader may have ended before it."""
        if not self._may_start_over():
            return False
        loader, until = self._loader(), time.monotonic() + _GATHER
        while loader.returncode() is None and time.monotonic() < until:
            time.sleep(_LOOK)
        if loader.returncode() != UNPACKABLE:
            return False
        self._line.clear()
        say(loaders.starts_over(loader))
        self._restarts.ended_with_all([loader])
        self._begin_anew()
        self._arguments.load_plain()
        self._children = [self._another_loader()]
        self._arguments.keep_words(loader)
        loader.close()
        self._watchdog.begin_again()
        return True

    def _may_start_over(self):
        """Whether the loader may find, or have found, that its weights cannot be packed."""
        return not self._deadline and self._arguments.packs() and not self._control.was_sealed

    def _loader(self):
        return next(child for child in self._children if child.name == LOADER)

    def _end_hung(self, stillness):
        """Kills the processes that hang if they may be replaced, as others that die; returns whether it did."""
        if self._deadline or not stillness.hung or not self._restarts.has_spare(stillness.hung, self._is_searching()):
            return False
        self._line.clear()
        say(stillness.sentence)
        for child in stillness.hung:
            child.signal(signal.SIGKILL)
        self._watchdog.begin_again()
        return True

    def _is_searching(self):
        """Whether the planner looks for a request that kills executors."""
        return self._arguments.restarts > 0 and self._own_status().get("suspects", 0) > 0

    def _begin_anew(self):
        """Ends everything but the loader, which has ended before its weights were whole or removed them; returns that one. The others
        are started once another loader is ready. In the first case they have done nothing yet."""
        loader = self._loader()
        others = [child for child in self._children if child is not loader]
        for child in others:
            child.signal(signal.SIGKILL)
        processes.wait_gone([child.descriptor for child in others], 30)
        for child in others:
            child.returncode()  # leaves no zombie
            child.close()
        self._restarts.ended_with_all(others)
        self._children = [loader]
        self._planner_goes_on = self._planner_goes_on or self._control.were_loaded
        self._control.close()
        segments.unlink_all(self._arguments.run_id)
        return loader

    def _replace(self, old):
        if old.name == LOADER:
            new = self._another_loader()
        elif old.name == PLANNER:
            new = self._child(PLANNER, self._arguments.planner_arguments(takes_over=True))
        else:
            new = self._child(EXECUTOR, self._arguments.executor_arguments(after_death=not self._restarts.asked_for(old)))
        self._children = [new if child is old else child for child in self._children]
        if not self._restarts.replaced(old, new):
            self._line.clear()
            say(f"{reason(old)[1]}; another one goes on")
        self._arguments.keep_words(old)
        old.close()

    def _another_loader(self):
        """One that adopts weights and pool where they are, or loads."""
        adopts = self._control.was_sealed
        if self._kept:
            self._kept = self._arguments.another_kept_loader(adopts)
            return self._kept
        return self._child(LOADER, self._arguments.loader_arguments(adopts))

    def _loader_is_ready(self):
        self._control.check_layout()
        return self._control.loader_state in (segments.LOADING, segments.SEALED) and self._arguments.loader_answers()

    def _relay(self):
        """Prints what the processes tell the user, such as the memory they will take."""
        for child in self._children:
            for text in child.new_lines():
                if child.name == LOADER:
                    if text in self._told_by_loaders:
                        continue  # by the one before
                    self._told_by_loaders.add(text)
                self._line.clear()
                say(text)

    def _words(self):
        return (self._control.loader_state, self._control.loaded_bytes, *self._control.progress, len(self._children))

    def _sleep(self, seconds):
        poll = select.poll()
        poll.register(self._interrupts.descriptor, select.POLLIN)
        # One that ended since `_ended` looked wakes us at once.
        living = [child for child in self._children if not child.end_seen] + [own for own in self._beside if own.returncode() is None]
        for child in living:
            poll.register(child.descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
        self._interrupts.drain()

    def _ended(self):
        """The processes that have ended. An executor that ended in order does not count at first: the planner has released it
        and is about to end, too."""
        ended = [child for child in self._children if child.returncode() is not None]
        for child in ended:
            child.end_seen = True
        if self._deadline and [child.name for child in ended] == [LOADER]:
            return []  # a kept loader that was signalled, too; its memory stays as long as others have it
        if ended and self._may_start_over() and self._control.loader_state == segments.DRAINING and self._loader().returncode() is None:
            return []  # its end will say why; before that it gives much memory back
        if self._restarts.pending():
            return ended
        if [(child.name, child.returncode()) for child in ended] == [(EXECUTOR, 0)]:
            self._alone_since = self._alone_since or time.monotonic()
            return ended if time.monotonic() - self._alone_since > _PLANNER_FOLLOWS else []
        return ended

    # ---- signals

    def _obey_interrupts(self):
        """At the first interrupt the planner is asked to finish what it writes; the second ends everything at once."""
        now = time.monotonic()
        if self._interrupts.count >= 2 or (self._deadline and now > self._deadline):
            self._killed_at_once = self._interrupts.count >= 2
            return Outcome(INTERRUPTED, "interrupted")
        if self._interrupts.count == 1 and not self._deadline:
            planners = [child for child in self._children if child.name == PLANNER]
            if not planners:
                return Outcome(INTERRUPTED, "interrupted before any work began")
            self._line.clear()
            say("stopping: what is finished is being written (interrupt again to end at once)")
            self._deadline = now + _FINISH
            planners[0].signal(signal.SIGTERM)
        return None

    # ---- the end

    def _conclude(self, ended):
        if self._output_is_written(ended):
            return Outcome(DONE)
        # Give the others a moment to end with their reasons, then report the root cause.
        until = time.monotonic() + _GATHER
        while time.monotonic() < until and len(ended) < len(self._children):
            time.sleep(0.02)
            ended = [child for child in self._children if child.returncode() is not None]
        code, sentence = self._root_cause(ended)
        if self._interrupts.count and code == INTERRUPTED:
            return Outcome(INTERRUPTED, "interrupted")
        return Outcome(INTERRUPTED if code == CANNOT_START and self._has_begun() else code, sentence)

    def _has_begun(self):
        """Whether there may be answers already. A process that cannot start from then on replaces one that could."""
        return self._restarts.happened() or self._own_status().get("iteration", 0) > 0

    def _own_status(self):
        return self._arguments.directory.status_of(self._arguments.run_id)

    def _root_cause(self, ended):
        """A process that was killed or crashed comes first, then one that refused, then those that only lost a peer; among
        equals, the first that was started."""

        def depth(child):
            code = child.returncode()
            if code < 0:
                return 0
            return 2 if code in (0, INTERRUPTED) else 1

        culprit = min(ended, key=depth)
        code, sentence = reason(culprit)
        if culprit.returncode() == -signal.SIGKILL and machine.oom_kills() > self._oom_kills:
            sentence += " by the kernel, because memory ran out (a smaller --host-memory leaves more to others)"
        return code, sentence

    def _end_all(self):
        """Ends our processes, then removes the shared memory. May be called at any time. Once the output is written, nothing hangs on
        how long the kernel takes for their memory: names and locks are in order, they end by themselves (common/process.h), and the
        next run waits for them (leftovers.py)."""
        stays = self._kept if self._kept and self._kept.may_stay(self._control) else None
        own = [child for child in self._children if child is not stays]
        quick = self._output_is_written(own) and self._held_bytes() > _MUCH
        for child in own:
            if child.returncode() is None:
                child.signal(signal.SIGKILL if self._killed_at_once else signal.SIGTERM)
                child.signal(signal.SIGCONT)  # a halted process ends in order once it goes on
        self._await(own, _QUICK_END if quick else _POLITE_END)
        for child in [] if quick else own:
            if child.returncode() is None:
                child.signal(signal.SIGKILL)
        self._await(own, 0 if quick else 30)
        for child in own:
            if child.returncode() is None and not quick:
                say(f"process {child.pid} ({child.plain_name}) does not end: the kernel holds it; its memory stays taken")
            self._arguments.keep_words(child)
        failpoint("supervisor.all_ended")
        if not stays:
            segments.unlink_all(self._arguments.run_id)
        self._control.close()
        for child in self._children:
            child.close()
        self._death_pipe.close()

    def _held_bytes(self):
        """Of host memory, at most: the planner has given the pool back already."""
        status = self._own_status()
        return status.get("host_pool_bytes", 0) + status.get("host_weights_bytes", 0)

    def _await(self, children, seconds):
        until = time.monotonic() + seconds
        living = [child for child in children if child.returncode() is None]
        while living and time.monotonic() < until:
            if any(child.name == EXECUTOR and child.returncode() is not None for child in children):
                self._death_pipe.tell()  # else the planner waits for the iteration under way
            if self._interrupts.count >= 2:
                for child in living:
                    child.signal(signal.SIGKILL)
            processes.wait_gone([child.descriptor for child in living], 0.1)
            living = [child for child in living if child.returncode() is None]
