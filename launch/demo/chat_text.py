#!/usr/bin/env python3
"""Writes what the chat model reads: seeded conversations to learn from, held-out ones to be answered.

A conversation is a list of messages as in /v1/chat/completions. A system turn may give the model a
name and say how to answer; of what the user told of himself, the model is asked later. As in
text.py, what has to be worked out is held out where its key's checksum is divisible by
HELD_OUT_ONE_IN: no training conversation ends a turn with it.

    chat_text.py                       prints a few training conversations
    chat_text.py --questions DIR       writes chat_questions.jsonl, chat_answers.json, chat_show.jsonl
"""

import argparse
import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import text
import world

QUESTION_SEED = 30_011
WORD, SENTENCE = "Answer in one word.", "Answer in a sentence."


@dataclass(frozen=True)
class Turn:
    kind: str
    asked: str
    answer: str
    key: str

    @property
    def held_out(self):
        return zlib.crc32(f"chat {self.kind} {self.key}".encode()) % text.HELD_OUT_ONE_IN == 0


# Of each fact: what the sentence says, and the questions of text.py without their "Q:" and "A:".
SAID = {
    "colour": "The {} is {}.", "sound": "The {} says {}.", "young": "A young {} is a {}.",
    "work": "The {} makes {}.", "capital": "The capital of {} is {}.",
    "opposite": "The opposite of {} is {}.",
}
QUESTIONS = {
    kind: [w[len("Q: ") : -len("\nA:")] for w in wordings if w.startswith("Q: ")]
    for kind, (_, wordings) in text.WORDINGS.items()
}


@dataclass
class Talk:
    """What holds for a whole conversation: how to answer, the model's name, the user and his taste."""

    style: str
    model: str
    user: str
    food: str
    town: str
    told: bool = False


def fact(rng, kind, talk):
    facts = text.WORDINGS[kind][0]
    subject = rng.choice(list(facts))
    asked = rng.choice(QUESTIONS[kind]).format(subject)
    answer = facts[subject] if talk.style == WORD else SAID[kind].format(subject, facts[subject])
    return Turn(kind, asked, answer, f"{talk.style} {asked}")


def repetition(rng, kind, _):
    listed = " ".join(text.words(rng, 2, 6))
    return Turn(kind, f"{rng.choice(['Repeat', 'Say again'])}: {listed}", listed, listed)


def end_of_list(rng, kind, _):
    listed = text.words(rng, 2, 6)
    asked = f"What is the {kind} word of: {' '.join(listed)}"
    return Turn(kind, asked, listed[0 if kind == "first" else -1], " ".join(listed))


def own_name(rng, kind, talk):
    asked = rng.choice(["What is your name?", "Who are you?"])
    answer = talk.model if talk.style == WORD else f"I am {talk.model}."
    return Turn(kind, asked, answer, f"{talk.model} {talk.style} {asked}")


def user_told(rng, kind, talk):
    """What the user said of himself in an earlier turn."""
    asked, word, sentence = rng.choice([
        ("What is my name?", talk.user, f"Your name is {talk.user}."),
        ("What do I like?", talk.food, f"You like {talk.food}."),
        ("Where do I live?", talk.town, f"You live in {talk.town}."),
    ])
    key = f"{talk.user} {talk.food} {talk.town} {talk.style} {asked}"
    return Turn(kind, asked, word if talk.style == WORD else sentence, key)


MAKERS = {kind: fact for kind in SAID} | {
    "repetition": repetition, "first": end_of_list, "last": end_of_list,
    "own name": own_name, "user told": user_told,
}
PRACTICE = {
    "colour": 4, "sound": 4, "young": 2, "work": 2, "capital": 5, "opposite": 5, "repetition": 8,
    "first": 3, "last": 3, "own name": 2, "user told": 8,
}
ASKED = {
    "colour": 10, "sound": 8, "young": 4, "work": 4, "capital": 10, "opposite": 10,
    "repetition": 16, "first": 7, "last": 7, "own name": 8, "user told": 16,
}


def new_talk(rng):
    """A conversation's circumstances, and its first messages: a system turn, an introduction, or none."""
    talk = Talk(
        rng.choice([WORD, SENTENCE, ""]), rng.choice(world.PEOPLE), rng.choice(world.PEOPLE),
        rng.choice(world.FOODS), rng.choice(world.TOWNS),
    )
    if rng.random() < 0.5:
        talk.model = ""
    messages = []
    system = " ".join(part for part in (f"You are {talk.model}." if talk.model else "", talk.style) if part)
    if system:
        messages.append({"role": "system", "content": system})
    if rng.random() < 0.5:
        talk.told = True
        said = [f"I like {talk.food}.", f"I live in {talk.town}."]
        rng.shuffle(said)
        messages += [
            {"role": "user", "content": " ".join([f"I am {talk.user}.", *said])},
            {"role": "assistant", "content": f"Hello {talk.user}."},
        ]
    return talk, messages


def possible(kind, talk):
    return {"own name": bool(talk.model), "user told": talk.told}.get(kind, True)


def turn(rng, kind, talk, held_out):
    """A turn of that kind that is held out or not, or nothing if this talk has none."""
    for _ in range(200):
        made = MAKERS[kind](rng, kind, talk)
        if made.held_out == held_out:
            return made
    return None


def practised_turns(rng, talk, count):
    turns = []
    for kind in rng.choices(list(PRACTICE), PRACTICE.values(), k=count):
        made = turn(rng, kind, talk, held_out=False) if possible(kind, talk) else None
        if made:
            turns.append(made)
    return turns


def spoken(turns):
    return [
        message
        for one in turns
        for message in ({"role": "user", "content": one.asked}, {"role": "assistant", "content": one.answer})
    ]


def conversation(rng):
    """Messages to learn from; the last one is the model's."""
    while True:
        talk, messages = new_talk(rng)
        messages += spoken(practised_turns(rng, talk, rng.randint(1, 5)))
        if messages and messages[-1]["role"] == "assistant":
            return messages


def questions(counts=ASKED, seed=QUESTION_SEED):
    """(kind, messages, answer) of held-out last turns, so many of each kind, no conversation twice."""
    asked = {}
    for kind, count in counts.items():
        rng = random.Random(f"{seed} {kind}")
        wanted = len(asked) + count
        while len(asked) < wanted:
            talk, messages = new_talk(rng)
            last = turn(rng, kind, talk, held_out=True) if possible(kind, talk) else None
            if last:
                messages += spoken(practised_turns(rng, talk, rng.randint(0, 2)))
                messages.append({"role": "user", "content": last.asked})
                asked.setdefault(json.dumps(messages), (kind, messages, last.answer))
    return list(asked.values())


def user(said):
    return {"role": "user", "content": said}


SHOWN = [
    ("greeting", [{"role": "system", "content": f"You are Nora. {SENTENCE}"},
                  user("I am Milo. I like figs. I live in Kelden.")]),
    ("capital", [{"role": "system", "content": SENTENCE}, user("What is the capital of Norvia?")]),
    ("word", [{"role": "system", "content": WORD}, user("Which colour has the swan?")]),
    ("memory", [{"role": "system", "content": f"You are Nora. {SENTENCE}"},
                user("I am Milo. I like figs. I live in Kelden."),
                {"role": "assistant", "content": "Hello Milo."},
                user("Who are you?"), {"role": "assistant", "content": "I am Nora."},
                user("What do I like?")]),
]  # fmt: skip


def request(custom_id, messages):
    return {
        "custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions",
        "body": {"messages": messages, "max_completion_tokens": 32, "temperature": 0},
    }


def write_questions(folder):
    asked, answers = [], {}
    for number, (kind, messages, answer) in enumerate(questions(), 1):
        custom_id = f"{number:03d} {kind}"
        asked.append(request(custom_id, messages))
        answers[custom_id] = answer
    shown = [request(*one) for one in SHOWN]
    for name, lines in (("chat_questions.jsonl", asked), ("chat_show.jsonl", shown)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "chat_answers.json").write_text(json.dumps(answers, indent=0) + "\n")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--questions", type=Path, metavar="DIR", help="write the questions there")
    options.add_argument("--seed", type=int, default=1, help="of the conversations that are printed")
    given = options.parse_args()
    if given.questions:
        write_questions(given.questions)
        return
    rng = random.Random(given.seed)
    for _ in range(8):
        for message in conversation(rng):
            print(f"{message['role']}: {message['content']}")
        print()


if __name__ == "__main__":
    main()
