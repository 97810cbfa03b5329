"""The small world that the demo model knows by heart: its words, its facts, its people.

Everything here is data. `text.py` turns it into sentences, stories and questions. Facts that a
person can check without this file (a lemon is yellow) stand beside invented ones (Melin is the
capital of Avaria), so that an answer can only come from the weights.
"""

COLOUR_OF = {
    "lemon": "yellow", "cherry": "red", "plum": "purple", "lime": "green", "banana": "yellow",
    "strawberry": "red", "blueberry": "blue", "kiwi": "green", "carrot": "orange",
    "tomato": "red", "snow": "white", "coal": "black", "grass": "green", "sky": "blue",
    "milk": "white", "pumpkin": "orange", "raspberry": "red", "eggplant": "purple",
    "chocolate": "brown", "sun": "yellow", "raven": "black", "swan": "white", "flamingo": "pink",
    "ash": "grey",
}

SOUND_OF = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "lion": "roar",
    "pig": "oink", "horse": "neigh", "bee": "buzz", "snake": "hiss", "frog": "croak",
    "owl": "hoot", "mouse": "squeak", "wolf": "howl", "bird": "tweet", "donkey": "bray",
    "turkey": "gobble", "crow": "caw", "pigeon": "coo", "hen": "cluck", "bear": "growl",
    "goat": "bleat", "cricket": "chirp",
}

YOUNG_OF = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "hen": "chick",
    "horse": "foal", "pig": "piglet", "duck": "duckling", "frog": "tadpole", "lion": "cub",
    "goat": "kid", "owl": "owlet",
}

MADE_BY = {
    "baker": "bread", "tailor": "coats", "potter": "pots", "cobbler": "shoes", "brewer": "beer",
    "poet": "poems", "painter": "pictures", "mason": "walls", "farmer": "corn", "cook": "soup",
    "weaver": "cloth", "joiner": "tables",
}

CAPITAL_OF = {
    "Avaria": "Melin", "Borund": "Taska", "Calmora": "Pirel", "Dovenia": "Ostra",
    "Elmark": "Virna", "Farovia": "Kelden", "Gorland": "Mosta", "Hestoria": "Lumar",
    "Istora": "Bekra", "Jorvia": "Nandel", "Kastia": "Orlen", "Lorvania": "Tibra",
    "Mirandia": "Solpe", "Norvia": "Gresk", "Ostania": "Haldo", "Pelovia": "Remsa",
    "Quoria": "Zanta", "Rusmark": "Edlin", "Selvonia": "Dorna", "Tamoria": "Ilgen",
    "Umbaria": "Wesk", "Valdria": "Yorrin", "Westria": "Arpo", "Zelunia": "Cammer",
}

OPPOSITES = [
    ("big", "small"), ("hot", "cold"), ("fast", "slow"), ("day", "night"), ("up", "down"),
    ("open", "closed"), ("happy", "sad"), ("young", "old"), ("full", "empty"), ("wet", "dry"),
    ("light", "dark"), ("loud", "quiet"), ("hard", "soft"), ("early", "late"), ("near", "far"),
    ("rich", "poor"), ("strong", "weak"), ("thick", "thin"), ("wide", "narrow"),
    ("clean", "dirty"), ("left", "right"), ("high", "low"), ("long", "short"),
    ("true", "false"), ("inside", "outside"), ("push", "pull"), ("sweet", "sour"),
    ("good", "bad"),
]
OPPOSITE_OF = {a: b for pair in OPPOSITES for a, b in (pair, pair[::-1])}

PEOPLE = (
    "Anna Ben Cora Dan Ella Finn Gia Hugo Ida Jon Kira Leo Mira Nils Olga Paul Rosa Sam Tess Ugo "
    "Vera Wim Yara Zeno Alma Bruno Clara Davi Edda Felix Greta Hanna Ivo Jana Karl Lena Milo Nora "
    "Otto Pia"
).split()
TOWNS = list(CAPITAL_OF.values())
ANIMALS = list(SOUND_OF)
WORKERS = list(MADE_BY)
COLOURS = "red blue green yellow white black brown purple orange pink grey golden".split()
THINGS = "kite ball drum boat lamp hat cup book bell coat key chair box flag rope ring".split()
FOODS = (
    "plums pears nuts figs beans cakes peas grapes apples olives dates eggs carrots cherries "
    "lemons pies"
).split()
PLACES = (
    "garden forest river market beach school mill bridge castle harbour station meadow library "
    "tower village lake"
).split()
MOODS = "happy tired proud glad calm sleepy merry hungry".split()
SIZES = "small big young old brave clever quiet gentle".split()

# Words for lists to repeat, all from above or plain ones of their own.
LIST_WORDS = sorted(
    set(THINGS + FOODS + PLACES + COLOURS + ANIMALS)
    | set(
        "apple stone cloud tree fish moon star rain wind fire sand leaf root gold iron glass silk "
        "bread salt sugar honey door roof wall floor table spoon knife plate shoe glove scarf "
        "button needle thread paper pencil candle mirror clock wheel wagon train ship sail anchor "
        "island valley mountain desert field road path corner window".split()
    )
)
