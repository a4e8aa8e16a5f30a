#!/usr/bin/env python3
"""Write the sample data set, train.json and dev.json, in SQuAD v1.1 format, next to this file.

    python data/sample/make_sample.py              # rewrites both files, to the same bytes every time
    python data/sample/make_sample.py --out DIR    # writes them somewhere else

The sentences and questions are in paragraphs_*.txt: for every kind of paragraph (a lighthouse, a festival, a
painter...) several facts, and for each fact several ways to say it and to ask about it. This program invents the
people, places and things and puts the paragraphs together. Everything is fiction.

How train and dev are kept apart:

* names of people, places, ships, books, firms and so on are made from separate word lists (NAMES below), so that no
  name in dev occurs in train;
* every list of answers in paragraphs_*.txt has a train part and a dev part, separated by "||";
* sentences marked "+" and questions marked "!" are used in dev only, and some kinds are in dev only, so that a good
  score needs reading and not the memory of a phrase.
"""

import argparse
import json
import random
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEED = 20240229
ARTICLES = {"train": 33, "dev": 14}  # an article is about one town
PARAGRAPHS = 4  # in each article
QUESTIONS = (3, 6)  # about each paragraph, from and to
WORDS = (35, 60)  # in each paragraph, from and to
ALTERNATIVES = 0.5  # the share of dev questions, among those that have any, that list further gold answers


def words(text):
    return text.split()


def phrases(text):
    return text.split("; ")


MONTHS = words("January February March April May June July August September October November December")
UNITS = words("one two three four five six seven eight nine")
TEENS = words("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
NUMBERS = ["zero", *UNITS, *TEENS]
NUMBERS += [ten + unit for ten in ("twenty", "thirty") for unit in ("", *(f"-{unit}" for unit in UNITS))]
NUMBERS += ["forty"]

# Word lists for names. The train and the dev list of a pair share no word.
NAMES = {
    "train": {
        "he": words(
            "Adam Albert Bruno Carl Daniel Edgar Felix George Henry Hugo Jacob Jonas Leo Martin Max Nathan Oliver Otto "
            "Paul Peter Ralph Samuel Simon Stephen Thomas Victor Walter William"
        ),
        "she": words(
            "Agnes Alice Anna Bertha Clara Diana Edith Ella Emma Flora Grace Helen Ida Irene Julia Laura Lucy Maria "
            "Martha Nora Olive Rosa Ruth Sarah Sophie Susan Vera Wilma"
        ),
        "surname": (
            words(
                "Ash Bar Bell Brand Carl Chal Corn Dal Dun Fair Fen Gar Good Hal Har Hazel Kel Lang Lock Mar Mel Nor "
                "Oak Pem Ren Rod Sal Sand Thorn Wal War Win"
            ),
            words("bank beck bourne combe don field gate hall hurst leigh man more rick son well wright"),
        ),
        "place": (
            words(
                "Alder Apple Bracken Briar Candle Cinder Clover Copper Corrow Dorn Dove Falcon Fennel Grim Hollow Hop "
                "Juniper Larch Linden Maple Marl Nettle Orchard Otter Pebble Raven Saffron Salt Sorrel Summer Swin "
                "Tansy Thistle Willow Winter Yarrow"
            ),
            words(
                "bridge bury by cliff combe cross dale ford ham haven hurst ley mouth port stead ton well wick worth"
            ),
        ),
        "river": words(
            "Arnel Bellow Craddy Dovel Esker Farrow Luneth Marl Otterby Pinkle Rill Sarn Tamble Uskel Weaverly Yarl"
        ),
        "adjective": words(
            "Bitter Broken Crimson Distant Empty Foreign Golden Hollow Iron Last Little Lonely Long Painted Quiet "
            "Red Second Silent Stolen Summer White Wild"
        ),
        "noun": words(
            "Acre Bell Candle Crown Daughter Door Field Garden Harbour Horse House Kingdom Ladder Letter Mirror "
            "Orchard Road Stranger Table Tower Window Winter"
        ),
        "ship": words(
            "Albatross Comet Diamond Dolphin Eagle Falcon Fortune Heron Hope Morning Osprey Pearl Pilgrim Queen "
            "Seagull Star Swan Victory"
        ),
        "shipword": words(
            "Blue Black Bold Brave Eastern Fair Golden Good Great Grey Merry Northern Proud Royal Silver Swift"
        ),
        "street": words(
            "Baker Bishop Cannon Chapel Cooper Court Fisher Hill Market Mercer North Palace River Saddler Silk Tanner "
            "Temple Weaver"
        ),
        "fest": words(
            "Apple Barley Bell Candle Cherry Drum Goose Herring Honey Kite Lantern Onion Plough Ribbon Rope Snow "
            "Swallow Wheel"
        ),
        "queen": words("Adela Cordula Isolde Leonora Mathilda Ottilie Ursula"),
        "cup": words("Copper Dolphin Ebony Hunter Ivory Lily Oar Raven Silver Wind"),
        "paper": words("Courier Echo Herald Mirror Sentinel Standard Voice"),
        "bird": words("crane duck finch lark owl sparrow swallow thrush wren"),
        "instr": (words("bar cal dor fal har lam mor tam "), words("vel ion dola rina phone bina")),
        "quote": phrases(
            "a long walk in the rain; the best joke of the century; a cathedral made of paper; soup without salt; "
            "honest to the last comma; a storm in a drawer; worth every sleepless night; a sermon for clever cats"
        ),
    },
    "dev": {
        "he": words("Arthur Conrad David Frank Gilbert Ivan Joseph Lewis Michael Robert Roger Theodore"),
        "she": words("Beatrice Catherine Dora Eleanor Frances Hilda Jane Louise Margaret Pauline Teresa Violet"),
        "surname": (
            words("Bow Clay Crom Dray Ever Flint Graf Holl Ken Lind Mont Pres Quin Shel Tem Under"),
            words("bridge brook dell den er hart lake mire ridge sted ward wood"),
        ),
        "place": (
            words("Amber Birch Bramble Cobble Deep Eagle Frost Gorse Heather Iron Lake Moss Pine Quill Silver Swan"),
            words("bank borough church cote fell gate hill holm minster moor pool shore strand thorpe water"),
        ),
        "river": words("Ander Brith Colyn Drove Ember Gannick Hyle Ivelle Thorle Wendle"),
        "adjective": words("Ancient Blind Borrowed Burning Forgotten Frozen Hidden Secret Seventh Wooden"),
        "noun": words("Bride Cathedral Clock Forest Island Kitchen Lamp Promise River Shadow Thief Violin"),
        "ship": words("Antelope Beacon Dragon Emerald Griffin Lion Mermaid Phoenix Thunder Unicorn"),
        "shipword": words("Ancient Crimson Gallant Jolly Noble Southern Wandering Western"),
        "street": words("Abbey Bridge Castle Copper Garden Lamb Mint Quarry School Tower"),
        "fest": words("Acorn Bonfire Feather Mask Pear Pepper Salmon Shepherd Torch Walnut"),
        "queen": words("Brigitta Eugenia Rosamund"),
        "cup": words("Anchor Crystal Elm Harvest Sunrise"),
        "paper": words("Bugle Chronicle Observer Tribune"),
        "bird": words("curlew kestrel plover robin starling"),
        "instr": (words("bel gor min pan sor tul "), words("bourine chord dolin net ska")),
        "quote": phrases(
            "a letter to nobody in particular; the slowest murder ever told; bread for the hungry mind; three good "
            "pages and a cough; thunder heard from a cellar"
        ),
    },
}


class Kind:
    """One kind of paragraph: its lists of values and its facts, each with sentences and questions."""

    def __init__(self, name, flags):
        self.name, self.flags, self.values, self.facts = name, flags, {}, []


def read_kinds(path):
    """Read a paragraphs file: see its first lines for the notation."""
    kinds, fresh = [], True
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if line.startswith("kind "):
            _, name, *flags = line.split()
            kinds.append(Kind(name, flags))
            fresh = True
        elif line.startswith("set "):
            name, _, values = line[4:].partition(" = ")
            kinds[-1].values[name.strip()] = values.strip()
        elif line[:2] in ("* ", "+ "):
            if fresh:
                kinds[-1].facts.append({"*": [], "+": [], "?": {}, "!": {}})
            kinds[-1].facts[-1][line[0]].append(line[2:])
            fresh = False
        elif line[:2] in ("? ", "! "):
            slot, _, question = line[2:].partition(": ")
            kinds[-1].facts[-1][line[0]].setdefault(slot, []).append(question)
        elif not line:
            fresh = True
        elif not line.startswith("#"):
            raise ValueError(f"{path.name}: cannot read {line!r}")
    return kinds


class Person(str):
    """A full name that knows its pronouns."""

    def form(self, form):
        he = self.pronoun == "he"
        forms = {"he": ("she", "he"), "his": ("her", "his"), "him": ("her", "him"), "last": (self.split()[-1],) * 2}
        return forms[form][he]


class Inventor:
    """Makes up names, years and numbers for one split, without using a name twice."""

    def __init__(self, split, rng):
        self.split, self.rng, self.lists = split, rng, NAMES[split]
        self.used, self.decks = set(), {}

    def deal(self, key, cards):
        """Draw from `cards` like from a shuffled deck, so that all are used before one comes again."""
        deck = self.decks.setdefault(key, [])
        if not deck:
            deck.extend(cards)
            self.rng.shuffle(deck)
        return deck.pop()

    def fresh(self, make):
        """Call `make` until it gives a name that no other thing has."""
        for _ in range(2000):
            name = make()
            if name not in self.used:
                self.used.add(name)
                return name
        raise ValueError("the word lists are too short for so many names")

    def compound(self, key, start, end):
        """A name made of two parts, such as Rose + wick. Tripled letters (Bell + leigh) look wrong, so none."""
        while True:
            name = self.deal(key + "1", start) + self.deal(key + "2", end)
            if not re.search(r"(.)\1\1", name) and name[: len(name) // 2].lower() != name[len(name) // 2 :]:
                return name

    def surname(self):
        """Surnames may come again in another paragraph, with another first name, as they do in life."""
        return self.compound("surname", *self.lists["surname"])

    def person(self, pronoun=None):
        pronoun = pronoun or self.rng.choice(["he", "she"])
        person = self.fresh(lambda: self.deal(pronoun, self.lists[pronoun]) + " " + self.surname())
        person = Person(person)
        person.pronoun = pronoun
        return person

    def place(self):
        return self.fresh(lambda: self.compound("place", *self.lists["place"]))

    def ship(self):
        return self.fresh(
            lambda: self.deal("shipword", self.lists["shipword"]) + " " + self.deal("ship", self.lists["ship"])
        )

    def title(self):
        return self.fresh(
            lambda: (
                "The " + self.deal("adjective", self.lists["adjective"]) + " " + self.deal("noun", self.lists["noun"])
            )
        )

    def firm(self):
        end = self.rng.choice([" and Sons", " Brothers", " and Company", " Works"])
        return self.fresh(lambda: self.surname() + end)

    def street(self):
        return self.deal("street", self.lists["street"]) + " Street"

    def instr(self):
        return self.fresh(lambda: self.compound("instr", *self.lists["instr"]))

    def number(self, text):
        """A value from a range: `12..60 metres`, `three..eleven` (in words) or a plain `200..900`."""
        low, high, unit = re.fullmatch(r"([\w-]+)\.\.([\w-]+)(.*)", text).groups()
        if low in NUMBERS:
            return NUMBERS[self.rng.randint(NUMBERS.index(low), NUMBERS.index(high))] + unit
        value = self.rng.randint(int(low), int(high))
        if int(high) >= 1000:  # nobody counts 13,847 visitors
            step = 10 ** max(0, len(str(value)) - 2)
            value = max(int(low), value // step * step)
        return f"{value:,}{unit}"

    def choice(self, key, text):
        """A value from a list, `train; train || dev; dev`."""
        train, _, dev = text.partition(" || ")
        return self.deal(key, (dev or train if self.split == "dev" else train).split("; "))


class Values(dict):
    """The values that a paragraph mentions. Each is made up when it is first asked for, so that no name is wasted."""

    def __init__(self, inventor, kind, town):
        super().__init__(town=town)
        self.inventor, self.kind = inventor, kind
        # y1 < y2 < y3 < y4 are the years of the story; d1 is a date in the year y1.
        start, _, end = kind.values.get("start", "1835..1905").partition("..")
        year = inventor.rng.randint(int(start), int(end))
        for count, gap in enumerate(["0..0", *kind.values.get("gaps", "3..14 9..30 5..20").split()], 1):
            low, _, high = gap.partition("..")
            year += inventor.rng.randint(int(low), int(high))
            self[f"y{count}"] = str(year)

    def __missing__(self, slot):
        self[slot] = self.make(slot)
        return self[slot]

    def make(self, slot):
        inventor, text = self.inventor, self.kind.values.get(slot)
        if text is None:
            name = slot.rstrip("0123456789")
            if name == "d":
                return f"{inventor.rng.randint(1, 28)} {inventor.rng.choice(MONTHS)} {self['y' + slot[1:]]}"
            if name in ("river", "fest", "queen", "cup", "paper", "bird", "quote"):
                return inventor.deal(name, inventor.lists[name])
            return getattr(inventor, "person" if name == "p" else name)()
        if text in ("he", "she"):  # a duchess, an aunt, a queen's husband
            return inventor.person(text)
        if re.fullmatch(r"y\d - y\d", text):
            return str(int(self[text[:2]]) - int(self[text[-2:]]))
        if ".." in text:
            return inventor.number(text)
        return inventor.choice(self.kind.name + slot, text)


def fill(template, values):
    """Fill in a sentence; give its text, {slot: (start, end)} and {slot: (start, end) of a longer answer}."""
    text, spans, wider, opened = "", {}, {}, []
    for piece in re.split(r"(\{[^}]*\}|\[|\])", template):
        if piece == "[":
            opened.append((len(text), []))
        elif piece == "]":
            start, slots = opened.pop()
            for slot in slots:
                wider[slot] = (start, len(text))
        elif piece.startswith("{"):
            slot, _, form = piece[1:-1].partition(".")
            start = len(text)
            text += values[slot].form(form) if form else values[slot]
            if not form:
                spans.setdefault(slot, (start, len(text)))
                for _, slots in opened:
                    slots.append(slot)
        else:
            text += piece
    return text[0].upper() + text[1:], spans, wider


def others(text, span, slot, value):
    """Spans that a second reader might have marked: a preposition more, a surname or a number alone."""
    start, end = span
    if isinstance(value, Person):
        return [(end - len(value.form("last")), end)]
    if re.fullmatch(r"(y|d|place)\d", slot):
        before = re.search(r"\b(in|on|at|from|near|off|to|until) $", text[:start], re.IGNORECASE)
        return [(before.start(), end)] if before else []
    number = re.match(
        r"([\d,]+|\w+(?:-\w+)?) (metres|kilometres|centimetres|crowns|days|weeks|months|years|hours)$", value
    )
    return [(start, start + number.end(1))] if number else []


def wordings(fact, slot, split):
    """The questions about `slot` that may be asked in this split.

    A question that mentions a name is another question for every name. One that does not ("How long is it?") would be
    the same in both splits, so dev gets those marked "!" or else the last one, and train gets the others.
    """
    asked, extra = fact["?"].get(slot, []), fact["!"].get(slot, [])
    named = [question for question in asked if "{" in question]
    general = [question for question in asked if "{" not in question]
    kept = 1 if not extra and len(asked) > 1 else 0
    for_dev = general[len(general) - kept :] if general else []
    if split == "train":
        return [question for question in asked if question not in for_dev]
    return extra + for_dev + named


def paragraph(kind, split, values, rng, avoid):
    """Put one paragraph together; give its context and a list of (question, [answers]), none of them in `avoid`."""
    low, high = WORDS
    while True:
        goal, length, chosen = rng.randint(low + 2, high - 12), 0, []
        for fact in [kind.facts[0], *rng.sample(kind.facts[1:], len(kind.facts) - 1)]:
            if length < goal:
                new = split == "dev" and fact["+"] and rng.random() < 0.6
                template = rng.choice(fact["+" if new else "*"])
                length += len(template.split())
                chosen.append((kind.facts.index(fact), fact, template))
        # Keep the order of the file: its first fact introduces the subject and the rest is roughly in order of time.
        chosen = [(fact, fill(template, values)) for _, fact, template in sorted(chosen, key=lambda item: item[0])]
        if low <= sum(len(text.split()) for _, (text, _, _) in chosen) <= high:
            break
    context, asked = "", []
    for fact, (text, spans, wider) in chosen:
        context += " " if context else ""
        base, context = len(context), context + text
        for slot in sorted(set(fact["?"]) | set(fact["!"])):
            questions = [fill(question, values)[0] for question in wordings(fact, slot, split)]
            questions = [question for question in questions if question not in avoid]
            if slot not in spans or not questions:
                continue
            question = rng.choice(questions)
            golds = [spans[slot], *others(text, spans[slot], slot, values[slot])]
            if slot in wider:
                golds.insert(1, wider[slot])
            golds = [{"text": text[s:e], "answer_start": base + s} for s, e in dict.fromkeys(golds)]
            asked.append((question, golds))
    # Long answers (reasons, stories) are rarer than names and years, so they are asked for whenever there is one.
    rng.shuffle(asked)
    asked.sort(key=lambda item: len(item[1][0]["text"].split()) < 4)
    asked = asked[: rng.randint(QUESTIONS[0] + 1, QUESTIONS[1])]
    rng.shuffle(asked)
    return context, asked


def make(split, kinds, rng, avoid=()):
    """Make the articles of one split."""
    inventor = Inventor(split, rng)
    kinds = [kind for kind in kinds if split == "dev" or "dev" not in kind.flags]
    articles, count = [], 0
    for number in range(ARTICLES[split]):
        town = inventor.place()
        shore = "coast" if number % 2 else "inland"
        paragraphs, taken = [], set()
        for _ in range(PARAGRAPHS):
            while True:
                kind = inventor.deal("kind", kinds)
                if kind.name not in taken and (shore in kind.flags or not {"coast", "inland"} & set(kind.flags)):
                    break
            taken.add(kind.name)
            context, asked = paragraph(kind, split, Values(inventor, kind, town), rng, avoid)
            qas = []
            for question, golds in asked:
                count += 1
                if split == "train" or rng.random() > ALTERNATIVES:
                    golds = golds[:1]
                qas.append({"id": f"{split}-{count:05d}", "question": question, "answers": golds})
            paragraphs.append({"context": context, "qas": qas})
        articles.append({"title": town, "paragraphs": paragraphs})
    return {"version": "1.1", "data": articles}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write train.json and dev.json to")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [kind for path in sorted(HERE.glob("paragraphs*.txt")) for kind in read_kinds(path)]
    dev = make("dev", kinds, random.Random(f"{SEED} dev"))
    asked = {
        qa["question"] for article in dev["data"] for paragraph in article["paragraphs"] for qa in paragraph["qas"]
    }
    train = make("train", kinds, random.Random(f"{SEED} train"), avoid=asked)
    for split, made in (("train", train), ("dev", dev)):
        text = json.dumps(made, ensure_ascii=False, indent=1) + "\n"
        (folder / f"{split}.json").write_text(text, encoding="utf-8", newline="\n")
        paragraphs = [p for article in made["data"] for p in article["paragraphs"]]
        count = sum(len(p["qas"]) for p in paragraphs)
        print(f"{split}: {len(made['data'])} articles, {len(paragraphs)} paragraphs, {count} questions")


if __name__ == "__main__":
    main()
