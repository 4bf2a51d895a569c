"""English to German in a small grammar, in which sentences have several right translations.

German nouns have a gender, articles and adjectives agree with it in case and number, verbs stand second in a main
clause and last in a subordinate one, their prefixes part from them, and nouns are compounded.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from foretell.lab.nat.pairs import Pair


def _table(text: str) -> list[list[str]]:
    """Entries with commas between them, as words."""
    return [entry.split() for entry in text.split(",")]


_NOUNS = _table(
    "man men Mann Männer m,woman women Frau Frauen f,child children Kind Kinder n,teacher teachers Lehrer Lehrer m,"
    "friend friends Freund Freunde m,doctor doctors Arzt Ärzte m Mediziner Mediziner m,dog dogs Hund Hunde m,"
    "cat cats Katze Katzen f,horse horses Pferd Pferde n,guest guests Gast Gäste m Besucher Besucher m,"
    "key keys Schlüssel Schlüssel m,house houses Haus Häuser n Gebäude Gebäude n,"
    "door doors Tür Türen f Pforte Pforten f,book books Buch Bücher n,letter letters Brief Briefe m,"
    "car cars Auto Autos n Wagen Wagen m,plan plans Plan Pläne m,"
    "picture pictures Bild Bilder n Foto Fotos n,chair chairs Stuhl Stühle m,lamp lamps Lampe Lampen f,"
    "bread breads Brot Brote n,map maps Karte Karten f,shop shops Laden Läden m Geschäft Geschäfte n,"
    "bag bags Tasche Taschen f,window windows Fenster Fenster n,boat boats Boot Boote n"
)
"""English singular and plural, German singular and plural and gender, and the same three of a synonym."""
_PEOPLE = 10
"""The first nouns act; all are acted upon."""
_MODIFIERS = _table(
    "garden Garten,school Schul,city Stadt,kitchen Küchen,winter Winter,company Firmen,toy Spielzeug,family Familien"
)
_ADJECTIVES = _table(
    "old alt,new neu,small klein,big groß,beautiful schön hübsch,red rot,cheap billig günstig,quiet still ruhig,"
    "tired müd,strange seltsam merkwürdig"
)
"""The last word of an adjective or an adverb is its synonym."""
_VERBS = _table(
    "sees see saw - sieht sehen sah gesehen,buys buy bought - kauft kaufen kaufte gekauft,"
    "finds find found - findet finden fand gefunden,sells sell sold - verkauft verkaufen verkaufte verkauft,"
    "needs need needed - braucht brauchen brauchte gebraucht,loves love loved - liebt lieben liebte geliebt,"
    "fetches fetch fetched ab holt holen holte abgeholt,invites invite invited ein lädt laden lud eingeladen,"
    "brings bring brought mit bringt bringen brachte mitgebracht,"
    "watches watch watched an schaut schauen schaute angeschaut,"
    "shows show showed vor zeigt zeigen zeigte vorgezeigt,paints paint painted - malt malen malte gemalt"
)
"""English third person, plural and past; German prefix, third person, plural, past and participle."""
_ADVERBS = _table("today heute,often oft häufig,again wieder erneut,soon bald,there dort,secretly heimlich")
_LINKS = {"because": "weil", "when": "wenn", "although": "obwohl", "before": "bevor"}
_GENDERS = "mfnp"
_STRONG = ("er en em", "e e er", "es es em", "e e en")
_MIXED = ("- en em", "e e er", "- - em", "e e en")
_DETERMINERS = {
    "the": (
        "",
        ("der den dem", "die die der", "das das dem", "die die den"),
        ("e en en", "e e en", "e e en", "en en en"),
    ),
    "this": ("dies", _STRONG, ("e en en", "e e en", "e e en", "en en en")),
    "my": ("mein", _MIXED, ("er en en", "e e en", "es es en", "en en en")),
    "a": ("ein", _MIXED, ("er en en", "e e en", "es es en", "e e en")),
}
"""German stem, its endings by gender (the last row: plural) and case, and those of an adjective behind it."""
_NOMINATIVE, _ACCUSATIVE, _DATIVE = range(3)


@dataclass(frozen=True)
class Wording:
    """How a translator words German; the wordings of one sentence differ in words and order."""

    adverb_first: bool = False
    perfect: bool = False
    """`hat gekauft`, not `kaufte`, for the past."""
    synonyms: bool = False


WORDINGS = tuple(Wording(*flags) for flags in product((False, True), repeat=3))


@dataclass(frozen=True)
class _Noun:
    """A noun with what stands before it, all by their indexes."""

    noun: int
    determiner: str
    plural: bool
    adjective: int | None
    modifier: int | None

    def english(self) -> list[str]:
        determiner = (
            {"this": "these", "a": ""}.get(self.determiner, self.determiner) if self.plural else self.determiner
        )
        adjective = "" if self.adjective is None else _ADJECTIVES[self.adjective][0]
        modifier = "" if self.modifier is None else _MODIFIERS[self.modifier][0]
        return [w for w in (determiner, adjective, modifier, _NOUNS[self.noun][self.plural]) if w]

    def german(self, case: int, wording: Wording) -> list[str]:
        entry = _NOUNS[self.noun]
        singular, plural, gender = entry[5:8] if wording.synonyms and len(entry) > 5 else entry[2:5]
        row = _GENDERS.index("p" if self.plural else gender)
        stem, endings, adjective_endings = _DETERMINERS[self.determiner]
        out = [] if self.plural and self.determiner == "a" else [stem + _ending(endings, row, case)]
        if self.adjective is not None:
            adjective = _ADJECTIVES[self.adjective]
            word = adjective[-1] if wording.synonyms else adjective[1]
            ending = _ending(adjective_endings, row, case)
            out.append(word + ending)
        noun = plural if self.plural else singular
        if self.plural and case == _DATIVE and noun[-1] not in "ns":
            noun += "n"
        return [*out, noun if self.modifier is None else _MODIFIERS[self.modifier][1] + noun.lower()]


def _ending(endings: tuple[str, ...], row: int, case: int) -> str:
    return endings[row].split()[case].strip("-")


@dataclass(frozen=True)
class _Clause:
    """Who does what to whom, with whom and when."""

    subject: _Noun
    verb: int
    tense: str
    what: _Noun
    company: _Noun | None
    adverb: int | None

    def english(self) -> list[str]:
        third, plain, past = _VERBS[self.verb][:3]
        present = plain if self.subject.plural else third
        verb = {"present": [present], "past": [past], "future": ["will", plain], "must": ["must", plain]}[self.tense]
        company = [] if self.company is None else ["with", *self.company.english()]
        adverb = [] if self.adverb is None else [_ADVERBS[self.adverb][0]]
        return [*self.subject.english(), *verb, *self.what.english(), *company, *adverb]

    def german(self, wording: Wording, subordinate: bool) -> list[str]:
        finite, final = self._verb(wording)
        subject, what = self.subject.german(_NOMINATIVE, wording), self.what.german(_ACCUSATIVE, wording)
        company = [] if self.company is None else ["mit", *self.company.german(_DATIVE, wording)]
        adverb = [] if self.adverb is None else [_ADVERBS[self.adverb][-1 if wording.synonyms else 1]]
        if subordinate:
            parts = bool(final) and final[0] == _VERBS[self.verb][3]
            end = [final[0] + finite] if parts else [*final, finite]
            return [*subject, *adverb, *what, *company, *end]
        if adverb and wording.adverb_first:
            return [*adverb, finite, *subject, *what, *company, *final]
        return [*subject, finite, *adverb, *what, *company, *final]

    def _verb(self, wording: Wording) -> tuple[str, list[str]]:
        """The finite verb, and what stands at the end of a main clause."""
        prefix, third, plural, past, participle = _VERBS[self.verb][3:]
        prefix, many = prefix.strip("-"), self.subject.plural
        if self.tense == "present":
            return plural if many else third, [prefix] if prefix else []
        if self.tense == "past" and wording.perfect:
            return "haben" if many else "hat", [participle]
        if self.tense == "past":
            return past + ("n" if past[-1] == "e" else "en") * many, [prefix] if prefix else []
        finite = {"future": ("wird", "werden"), "must": ("muss", "müssen")}[self.tense][many]
        return finite, [prefix + plural]


def draw_sentence(rng: np.random.Generator) -> tuple[str, list[str]]:
    """A random English sentence and its German translations, one per wording of `WORDINGS`."""
    clauses = [_draw_clause(rng) for _ in range(1 if rng.random() < 0.6 else 2)]
    link = list(_LINKS)[int(rng.integers(len(_LINKS)))]
    english = f" {link} ".join(" ".join(c.english()) for c in clauses)
    german = []
    for wording in WORDINGS:
        parts = [" ".join(c.german(wording, subordinate=i > 0)) for i, c in enumerate(clauses)]
        german.append(f" , {_LINKS[link]} ".join(parts))
    return english, german


def _draw_clause(rng: np.random.Generator) -> _Clause:
    tense = ("present", "past", "future", "must")[int(rng.choice(4, p=(0.3, 0.4, 0.15, 0.15)))]
    company = _draw_noun(rng, _PEOPLE) if rng.random() < 0.3 else None
    adverb = int(rng.integers(len(_ADVERBS))) if rng.random() < 0.5 else None
    who, what = _draw_noun(rng, _PEOPLE), _draw_noun(rng, len(_NOUNS))
    return _Clause(who, int(rng.integers(len(_VERBS))), tense, what, company, adverb)


def _draw_noun(rng: np.random.Generator, nouns: int) -> _Noun:
    noun, determiner = int(rng.integers(nouns)), list(_DETERMINERS)[int(rng.integers(len(_DETERMINERS)))]
    adjective = int(rng.integers(len(_ADJECTIVES))) if rng.random() < 0.4 else None
    modifier = int(rng.integers(len(_MODIFIERS))) if noun >= _PEOPLE and rng.random() < 0.4 else None
    return _Noun(noun, determiner, bool(rng.random() < 0.3), adjective, modifier)


def generate_pairs(count: int, seed: int, all_wordings: bool = False, exclude: Collection[str] = ()) -> Iterator[Pair]:
    """Random pairs; `all_wordings`: every translation is a reference, for evaluation; else one at random, for training.
    `exclude`: sources that are not drawn.
    """
    rng, drawn = np.random.default_rng(seed), 0
    while drawn < count:
        source, written = draw_sentence(rng)
        chosen = int(rng.integers(len(written)))
        if source not in exclude:
            drawn += 1
            yield Pair(source, tuple(dict.fromkeys(written if all_wordings else written[chosen : chosen + 1])))
