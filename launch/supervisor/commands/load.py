"""`poise load`: a loader that stays until `poise stop`."""

import json
import time

from ..lifecycle import inputs, leftovers, loaders, segments
from ..lifecycle.children import reason
from ..lifecycle.interrupts import Interrupts
from ..shared.options import add_json, add_loading, add_model, normalised, parser
from ..shared.paths import command_line
from ..shared.progress import LoadingRate, ProgressLine
from ..shared.quantities import bytes_text, duration
from ..shared.trouble import DONE, INTERRUPTED, UNPACKABLE, Refusal, say, shown, tell


def load(words):
    made = parser("load", "Loads a model and keeps it in memory for the runs to come; `poise stop` ends it.")
    add_model(made)
    add_loading(made)
    add_json(made)
    given = made.parse_args(normalised(words))
    inputs.check_limits(given.model)
    inputs.check_model(given.model)
    leftovers.sweep()
    home = loaders.Home.of(given)
    stale = home.why_stale(given)
    living = home.living() if stale is None else None
    if living:
        living.close()
        say(f"{shown(given.model)} is loaded already; end it with: {command_line('stop')}")
        return _told(given, {"loaded": False})
    if home.lives():
        attached = home.take()
        if attached is None:
            raise Refusal(f"{stale}, but a run still uses it: wait for it")
        upgraded = stale == loaders.OTHER_BUILD and home.upgrade(given)
        attached.give_back()
        if upgraded:
            say(f"{stale}: its successor has its memory, and nothing is read again")
            return _told(given, {"loaded": False})
        home.stop()
    given.gpu_memory = None
    inputs.clip_memory(given)
    return _load(loaders.Home.of(given, make=True), given)


def _load(home, given):
    interrupts, line, rate = Interrupts(), ProgressLine(), LoadingRate()
    lock = home.take()
    if lock is None:
        raise Refusal("another run is starting a kept loader of this model: try again")
    began = time.monotonic()
    loader = home.start(given)
    control = segments.ControlView(home.run_id)
    sealed, told = False, set()
    try:
        while not (sealed := loader.may_stay(control)):
            if loader.returncode() is not None:
                line.clear()
                if loader.returncode() == UNPACKABLE:
                    say(loaders.starts_over(loader))
                    loader.close()
                    control.close()
                    loader = home.start(loaders.plain(given))
                    control = segments.ControlView(home.run_id)
                    rate, began = LoadingRate(), time.monotonic()
                    continue
                code, sentence = reason(loader)
                say(sentence)
                return code
            if interrupts.count:
                line.clear()
                say("interrupted; nothing is kept")
                return INTERRUPTED
            control.check_layout()
            _relay(loader, line, told)
            if line.due():
                line.show(rate.text(control.loaded_bytes, *segments.reserved(home.run_id, "weights")))
            time.sleep(0.02)
        _relay(loader, line, told)
        line.clear()
        seconds = time.monotonic() - began
        size = segments.weights_bytes(home.run_id)
        say(
            f"{shown(given.model)}: {bytes_text(size)} in {duration(seconds)} ({size / seconds / 1e9:.2f} GB/s); "
            f"kept until: {command_line('stop')}"
        )
        return _told(given, {"loaded": True, "bytes": size, "seconds": round(seconds, 3)})
    finally:
        if not sealed:
            home.stop()
        lock.give_back()


def _told(given, facts):
    """`loaded`: whether the model was read now."""
    if given.json:
        tell(json.dumps({"model": given.model, "kept": True, **facts}))
    return DONE


def _relay(loader, line, told):
    """Prints the loader's warnings, such as tensors that the model does not use; not those that were `told`."""
    for text in loader.new_lines():
        if text not in told:
            told.add(text)
            line.clear()
            say(text)
