#!/usr/bin/env python3
"""Writes what the demo model reads: seeded documents to learn from, held-out questions to be asked.

An exercise is a prompt and the one right answer to it. Its key names what has to be worked out
(the two numbers of a sum, the words of a list, a fact and its wording, a whole story): where the
key's checksum is divisible by HELD_OUT_ONE_IN, the exercise is held out. No training document
ever holds such an exercise, and the questions consist of nothing else.

Same seed, same text, on every machine: only random.Random and zlib.crc32 decide.

    text.py                       prints a few training documents
    text.py --questions DIR       writes questions.jsonl, answers.json and show.jsonl there
"""

import argparse
import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import world

HELD_OUT_ONE_IN = 8
QUESTION_SEED = 20_011
ANSWER, STORY, PROMPT = 1.0, 0.15, 0.05  # how much a token counts in the loss, by where it stands


@dataclass(frozen=True)
class Exercise:
    kind: str
    prompt: str  # ends where the answer's leading space begins
    answer: str  # without that space and without the newline that ends it
    key: str

    @property
    def held_out(self):
        return zlib.crc32(f"{self.kind} {self.key}".encode()) % HELD_OUT_ONE_IN == 0


def ask(question):
    return f"Q: {question}\nA:"


def a(noun):
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


# --- exercises that stand alone ------------------------------------------------------------------

# Each fact has several wordings; the answer follows the last one's missing word.
WORDINGS = {
    "colour": (
        world.COLOUR_OF,
        [ask("What colour is the {}?"), ask("Which colour has the {}?"),
         ask("What is the colour of the {}?"), ask("Name the colour of the {}."),
         "The colour of the {} is", "The {} is"],
    ),
    "sound": (
        world.SOUND_OF,
        [ask("What does the {} say?"), ask("Which sound does the {} make?"),
         ask("What is the sound of the {}?"), ask("How does the {} sound?"),
         "The sound of the {} is", "The {} says"],
    ),
    "young": (
        world.YOUNG_OF,
        [ask("What is a young {}?"), ask("What is the child of the {}?"),
         ask("How do we call a young {}?"), ask("Name the child of the {}."),
         "The child of the {} is the", "A young {} is a"],
    ),
    "work": (
        world.MADE_BY,
        [ask("What does the {} make?"), ask("What comes from the {}?"),
         ask("What do we get from the {}?"), ask("Name the work of the {}."),
         "The work of the {} is", "The {} makes"],
    ),
    "capital": (
        world.CAPITAL_OF,
        [ask("What is the capital of {}?"), ask("Which town is the capital of {}?"),
         ask("Which capital has {}?"), ask("Name the capital of {}."),
         "The capital of {} is", "The first town of {} is"],
    ),
    "opposite": (
        world.OPPOSITE_OF,
        [ask("What is the opposite of {}?"), ask("Which word is the opposite of {}?"),
         ask("What is not {}?"), ask("Name the opposite of {}."),
         "The opposite of {} is", "Not {} is"],
    ),
}


def fact(rng, kind):
    facts, wordings = WORDINGS[kind]
    subject = rng.choice(list(facts))
    prompt = rng.choice(wordings).format(subject)
    return Exercise(kind, prompt, facts[subject], prompt)


def two_numbers(rng):
    return [rng.randrange(rng.choice((10, 100, 100, 100, 100))) for _ in range(2)]


def addition(rng, _):
    x, y = two_numbers(rng)
    prompt = rng.choice([ask("{} + {} = ?"), ask("What is {} + {}?"), "{} + {} ="]).format(x, y)
    return Exercise("addition", prompt, str(x + y), f"{min(x, y)} {max(x, y)}")


def subtraction(rng, _):
    y, x = sorted(two_numbers(rng))
    prompt = rng.choice([ask("{} - {} = ?"), ask("What is {} - {}?"), "{} - {} ="]).format(x, y)
    return Exercise("subtraction", prompt, str(x - y), f"{x} {y}")


def comparison(rng, _):
    x, y = rng.sample(range(100), 2)
    word, pick = rng.choice([("larger", max), ("smaller", min)])
    return Exercise(
        "comparison", ask(f"Which is {word}, {x} or {y}?"), str(pick(x, y)),
        f"{min(x, y)} {max(x, y)}",
    )


def counting(rng, _):
    first = rng.randrange(92)
    last = first + rng.randrange(2, 7)
    prompt = rng.choice([ask("Count from {} to {}."), "From {} to {}:"]).format(first, last)
    return Exercise(
        "counting", prompt, " ".join(map(str, range(first, last + 1))), f"{first} {last}"
    )


def words(rng, low, high):
    return rng.sample(world.LIST_WORDS, rng.randint(low, high))


def repetition(rng, _):
    listed = " ".join(words(rng, 2, 9))
    return Exercise(
        "repetition", rng.choice([ask("Repeat: {}"), "Say {} again:"]).format(listed), listed,
        listed,
    )


def end_of_list(rng, kind):
    listed = words(rng, 3, 9)
    prompt = ask(f"What is the {kind} word of: {' '.join(listed)}")
    return Exercise(kind, prompt, listed[0 if kind == "first" else -1], " ".join(listed))


MAKERS = {kind: fact for kind in WORDINGS} | {
    "addition": addition, "subtraction": subtraction, "comparison": comparison,
    "counting": counting, "repetition": repetition, "first": end_of_list, "last": end_of_list,
}
# How often each kind is practised: what has to be worked out more often than what is only known.
PRACTICE = {
    "colour": 2, "sound": 2, "young": 1, "work": 1, "capital": 3, "opposite": 3, "addition": 26,
    "subtraction": 24, "comparison": 3, "counting": 3, "repetition": 10, "first": 2, "last": 2,
}


def exercise(rng, kind, held_out):
    while (made := MAKERS[kind](rng, kind)).held_out != held_out:
        pass
    return made


# --- stories and questions about them ------------------------------------------------------------


def census(rng, people, roll):
    """Says one to four things of each of so many people, and what may be asked about them.

    In a roll the same thing is said of all: only the names tell its facts apart.
    """
    things_said = rng.choice([(1, 2, 2, 3), (2, 3, 4), (4,)])
    only = rng.randrange(4)
    names = rng.sample(world.PEOPLE, people)
    towns, foods = rng.sample(world.TOWNS, people), rng.sample(world.FOODS, people)
    places, workers = rng.sample(world.PLACES, people), rng.choices(world.WORKERS, k=people)
    owned = rng.sample([f"{c} {t}" for c in world.COLOURS for t in world.THINGS], people)
    sentences, questions = [], []
    for name, town, food, place, worker, thing in zip(names, towns, foods, places, workers, owned):
        facts = [
            (f"{name} lives in", town, f"Where does {name} live?", f"in {town}"),
            (f"{name} likes", food, f"What does {name} like?", food),
            (f"{name} went to the", place, f"Where did {name} go?", f"to the {place}"),
            (f"{name} has", a(thing), f"What does {name} have?", a(thing)),
            (f"{name} is", a(worker), f"What is {name}?", a(worker)),
        ]
        said = [facts[only]] if roll else rng.sample(facts, rng.choice(things_said))
        for beginning, end, question, answer in said:
            sentences.append(f"{beginning} {end}.")
            # One of the two for each fact: the second would be answered by the first.
            questions.append(rng.choice([(ask(question), answer), (beginning, f"{end}.")]))
    if rng.random() < 0.5:
        rng.shuffle(sentences)
    weather = ["The sun was warm.", "It was a quiet day.", "The wind was cold.", "A bird sang."]
    for line in rng.sample(weather, rng.randint(0, 2)):
        sentences.insert(rng.randint(0, len(sentences)), line)
    return " ".join(sentences), questions


def tale(rng):
    """One small adventure of two animals, and what may be asked about it."""
    (hero, friend), (kind, other) = rng.sample(world.PEOPLE, 2), rng.sample(world.ANIMALS, 2)
    home, found_at, goal = rng.sample(world.PLACES, 3)
    colour, thing = rng.choice(world.COLOURS), rng.choice(world.THINGS)
    food, mood = rng.choice(world.FOODS), rng.choice(world.MOODS)
    told = [
        f"Once there was {a(rng.choice(world.SIZES))} {kind} named {hero}.",
        f"{hero} lived near the {home}.",
        f"One day {hero} found {a(colour)} {thing} at the {found_at}.",
        f"{hero} said {world.SOUND_OF[kind]}.",
        f"Then {a(other)} named {friend} came along.",
        f"{friend} said {world.SOUND_OF[other]}.",
        f"{hero} gave the {thing} to {friend}.",
        f"They went to the {goal} and ate {food}.",
        f"At night they were {mood}.",
    ]
    questions = [
        (f"What did {hero} find?", a(f"{colour} {thing}")),
        (f"Who found the {thing}?", hero),
        (f"Who has the {thing} now?", friend),
        (f"What did {friend} get?", f"the {thing}"),
        (f"Where did {hero} live?", f"near the {home}"),
        ("What did they eat?", food),
        ("Where did they go?", f"to the {goal}"),
        ("Who came along?", friend),
        (f"What is {hero}?", a(kind)),
        (f"What is {friend}?", a(other)),
        ("How were they at night?", mood),
    ]
    return " ".join(told), [(ask(question), answer) for question, answer in questions]


def story(rng, kind, held_out):
    """A story of that kind, and its questions in the order of `rng`."""
    while True:
        if kind == "tale":
            told, questions = tale(rng)
        else:
            low, high = {"roll": (2, 12), "short story": (1, 6), "long story": (9, 16)}[kind]
            told, questions = census(rng, rng.randint(low, high), roll=kind == "roll")
        made = [Exercise(kind, f"{told}\n{asked}", answer, told) for asked, answer in questions]
        if made[0].held_out == held_out:
            rng.shuffle(made)
            return told, made


# --- documents to learn from ---------------------------------------------------------------------


def practice_document(rng):
    """Up to eight unrelated exercises under each other, as (text, weight) pieces."""
    pieces = []
    for kind in rng.choices(list(PRACTICE), PRACTICE.values(), k=rng.choice([1, 1, 2, 4, 6, 8])):
        made = exercise(rng, kind, held_out=False)
        pieces += [(made.prompt, PROMPT), (f" {made.answer}\n", ANSWER)]
    return pieces


def story_document(rng, kind):
    """A story, and some of what can be asked about it."""
    told, made = story(rng, kind, held_out=False)
    pieces = [(f"{told}\n", STORY)]
    for one in made[: rng.randint(1, 20)]:
        pieces += [(one.prompt[len(told) + 1 :], PROMPT), (f" {one.answer}\n", ANSWER)]
    return pieces


def document(rng, shares):
    """One document; `shares` weighs practice, tales, rolls, short stories and long stories."""
    kind = rng.choices(["practice", "tale", "roll", "short story", "long story"], shares)[0]
    return practice_document(rng) if kind == "practice" else story_document(rng, kind)


# --- questions to be asked -----------------------------------------------------------------------

ASKED = {
    "colour": 8, "sound": 8, "young": 4, "work": 4, "capital": 10, "opposite": 10, "addition": 25,
    "subtraction": 20, "comparison": 6, "counting": 10, "repetition": 18, "first": 8, "last": 8,
    "tale": 14, "roll": 8, "short story": 14, "long story": 22, "after others": 15,
}


def after_others(rng):
    """A held-out exercise at the end of a page of others, answered already."""
    kinds = rng.choices(list(PRACTICE), PRACTICE.values(), k=rng.randint(3, 8))
    before = [exercise(rng, kind, held_out=False) for kind in kinds[1:]]
    page = "".join(f"{one.prompt} {one.answer}\n" for one in before)
    last = exercise(rng, kinds[0], held_out=True)
    return Exercise("after others", page + last.prompt, last.answer, page + last.prompt)


def questions(counts=ASKED, seed=QUESTION_SEED):
    """Held-out exercises, so many of each kind or as many as there are, no prompt twice."""
    made = {}
    for kind, count in counts.items():
        rng = random.Random(f"{seed} {kind}")
        wanted, in_vain = len(made) + count, 0
        while len(made) < wanted and in_vain < 1000:
            if kind == "after others":
                one = after_others(rng)
            elif kind in MAKERS:
                one = exercise(rng, kind, held_out=True)
            else:
                one = story(rng, kind, held_out=True)[1][0]
            in_vain = in_vain + 1 if one.prompt in made else 0
            made.setdefault(one.prompt, one)
    return list(made.values())


SHOWN = [
    ("sum", ask("47 + 38 = ?"), 8),
    ("capital", ask("What is the capital of Norvia?"), 8),
    ("sound", ask("What does the owl say?"), 8),
    ("opposite", ask("What is the opposite of narrow?"), 8),
    ("repeat", ask("Repeat: moon river candle golden wheel"), 16),
    ("count", ask("Count from 57 to 62."), 32),
    (
        "story",
        "Rosa lives in Kelden. Milo has a green lamp. Rosa likes figs. Milo went to the harbour. "
        "Vera has a red boat. Vera lives in Taska.\n" + ask("What does Vera have?"),
        8,
    ),
    ("tale", "Once there was a clever wolf named Nora.", 80),
]


def request(custom_id, prompt, max_tokens):
    return {
        "custom_id": custom_id, "method": "POST", "url": "/v1/completions",
        "body": {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stop": ["\n"]},
    }


def write_questions(folder):
    asked, answers = [], {}
    for number, one in enumerate(questions(), 1):
        custom_id = f"{number:03d} {one.kind}"
        asked.append(request(custom_id, one.prompt, 32))
        answers[custom_id] = f" {one.answer}"
    shown = [request(*one) for one in SHOWN]
    for name, lines in (("questions.jsonl", asked), ("show.jsonl", shown)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "answers.json").write_text(json.dumps(answers, indent=0) + "\n")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--questions", type=Path, metavar="DIR", help="write the questions there")
    options.add_argument("--seed", type=int, default=1, help="of the documents that are printed")
    given = options.parse_args()
    if given.questions:
        write_questions(given.questions)
        return
    rng = random.Random(given.seed)
    for _ in range(8):
        print("".join(piece for piece, _ in document(rng, (1, 1, 1, 1, 1))))


if __name__ == "__main__":
    main()
