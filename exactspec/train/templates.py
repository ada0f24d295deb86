"""Prompts made from templates with random parts: word problems, algebra, code, rewriting, lists, and long ones.

They steer the training mix toward what people ask, in styles that a small model rarely writes by itself. Nothing here
is taken from a benchmark.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

WORDS: dict[str, list[str]] = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))
NAMES: list[str] = WORDS["names"]
THINGS: list[str] = WORDS["things"]
PLACES: list[str] = WORDS["places"]
TOPICS: list[str] = WORDS["topics"]
KINDS: list[str] = WORDS["kinds"]
TONES: list[str] = WORDS["tones"]
VERBS: list[str] = WORDS["verbs"]
OBJECTS: list[str] = WORDS["objects"]
CONDITIONS: list[str] = WORDS["conditions"]
PROJECTS: list[str] = WORDS["projects"]

FINAL = (
    "",
    "",
    "\nThink step by step and give the final answer inside \\boxed{}.",
    "\nPlease reason step by step, then write the result within \\boxed{}.",
    "\nShow your reasoning step by step and put the answer in \\boxed{}.",
    " Explain each step.",
)


def _numbers(rng: random.Random) -> tuple[int, int, int, int]:
    return rng.randint(2, 12), rng.randint(2, 30), rng.randint(5, 90), rng.randint(20, 400)


def _story(rng: random.Random) -> str:
    """A word problem out of two or three sentences."""
    a, b, c, d = _numbers(rng)
    one, two = rng.sample(NAMES, 2)
    thing, other = rng.sample(THINGS, 2)
    place = rng.choice(PLACES)
    opening = rng.choice(
        (
            f"{one} has {d} {thing} and gives {c} of them to {two}.",
            f"{one} buys {a} boxes of {thing} at the {place}. Each box holds {b} {thing}.",
            f"A {place} sells {thing} for ${a} each and {other} for ${b} each.",
            f"{one} earns ${b} an hour and works {a} hours a day, {rng.randint(3, 6)} days a week.",
            f"There are {d} {thing} in the {place}. {c}% of them are red and the rest are blue.",
            f"{one} is {c} years old. {two} is {a} years younger than {one}.",
            f"A train travels {d} miles in {a} hours, then {c} miles in {rng.randint(1, 4)} hours.",
            f"{one} reads {b} pages every day. The book has {d} pages.",
            f"A recipe needs {a} cups of flour for every {b} cookies. {one} wants to bake {b * a} cookies.",
            f"{one} and {two} share {d} {thing} in the ratio {a}:{a + 1}.",
            f"Every week {one} saves ${b}, and every month {one} spends ${c} on {thing}.",
            f"{one}'s garden is {b} meters long and {a} meters wide.",
            f"Last year the {place} had {d} visitors. This year it had {c}% more.",
        )
    )
    middle = rng.choice(
        (
            "",
            f" Then {two} brings {rng.randint(2, 40)} more {other}.",
            f" On {rng.choice(('Monday', 'Friday', 'Sunday'))} the number doubles.",
            f" Half of the {thing} are broken.",
            f" {two} has {a} times as many.",
            f" The price drops by {rng.choice((10, 15, 20, 25, 50))}%.",
        )
    )
    question = rng.choice(
        (
            f" How many {thing} are left?",
            f" How many {thing} does {one} have in total?",
            f" How much money does {one} spend altogether?",
            f" How much does {one} earn in {rng.randint(2, 8)} weeks?",
            f" What is the total cost of {rng.randint(2, 9)} {thing} and {rng.randint(2, 9)} {other}?",
            " How long does it take?",
            " What is the average speed in miles per hour?",
            f" How many more {thing} does {two} have than {one}?",
            f" What will the number be after {rng.randint(2, 6)} weeks?",
        )
    )
    return opening + middle + question + rng.choice(FINAL)


def _polynomial(rng: random.Random, letter: str = "x") -> str:
    a, b, c = rng.randint(1, 9), rng.randint(-12, 12), rng.randint(-20, 20)
    lead = f"{a if a > 1 else ''}{letter}^2"
    return f"{lead} {'+' if b >= 0 else '-'} {abs(b)}{letter} {'+' if c >= 0 else '-'} {abs(c)}"


def _algebra(rng: random.Random) -> str:
    a, b, c, d = _numbers(rng)
    task = rng.choice(
        (
            f"Solve for $x$: ${a}x + {b} = {c}$.",
            f"Find all real solutions of ${_polynomial(rng)} = 0$.",
            f"Factor the expression ${_polynomial(rng)}$ completely.",
            f"If $f(x) = {_polynomial(rng)}$, compute $f({rng.randint(-6, 6)})$.",
            f"If $f(x) = \\frac{{{a}x - {b}}}{{x + {c}}}$, what is $f({rng.randint(1, 9)})$? Give a common fraction.",
            f"Compute $\\frac{{{a}}}{{{b}}} + \\frac{{{rng.randint(1, 9)}}}{{{rng.randint(2, 12)}}}$ in lowest terms.",
            f"What is the remainder when ${d}$ is divided by ${a}$?",
            f"What is the greatest common divisor of {a * b} and {a * c}?",
            f"How many positive divisors does {d} have?",
            f"A circle has radius ${a}$ cm. What is its area in terms of $\\pi$?",
            f"A right triangle has legs of length {a} and {b}. How long is the hypotenuse?",
            f"The sum of {rng.randint(3, 9)} consecutive integers is {d}. Find the largest of them.",
            f"Simplify $\\sqrt{{{a * a * rng.randint(2, 7)}}}$.",
            f"Evaluate $\\log_{{{rng.randint(2, 5)}}} {rng.choice((8, 16, 25, 27, 64, 81, 125, 243))}$.",
            f"What is the probability of rolling a sum of {rng.randint(2, 12)} with two fair dice?",
            f"In how many ways can {rng.randint(3, 8)} people sit around a round table?",
            f"An arithmetic sequence starts with {a} and has the common difference {b}. What is its {c}th term?",
            f"Let $a = {a}$ and $b = {b}$. Find the value of $a^2 + {rng.randint(2, 5)}ab - b^2$.",
            f"Find the slope of the line through $({a}, {b})$ and $({c}, {d})$.",
            f"Given are $\\mathbf{{u}} = ({a}, {b})$ and $\\mathbf{{v}} = ({-b}, {c})$. Find their dot product.",
            f"Convert the point $({a}, {b})$ to polar form.",
            f"Calculate {d} * {c} + {b} - {a}.",
            f"What is {rng.randint(2, 95)}% of {d}?",
            f"What is the derivative of ${_polynomial(rng, 't')}$ with respect to $t$?",
            f"For what value of $k$ does ${a}x^2 + kx + {b} = 0$ have exactly one solution?",
        )
    )
    return task + rng.choice(FINAL)


FORMS = ("function", "program", "script", "method")
LANGUAGES = ("Python",) * 8 + ("JavaScript", "Java", "C++", "C", "Rust", "Go", "SQL", "Bash", "TypeScript", "PHP")
TYPES = ("List[int]", "List[str]", "str", "int", "Dict[str, int]", "List[float]", "Tuple[int, int]", "bool", "float")


def _task(rng: random.Random) -> str:
    return f"{rng.choice(VERBS)} {rng.choice(OBJECTS)} {rng.choice(CONDITIONS)}".strip()


def _function_name(task: str) -> str:
    words = [w for w in "".join(c if c.isalnum() else " " for c in task.lower()).split() if w not in ("the", "of", "a")]
    return "_".join(words[:3])


def _skeleton(rng: random.Random) -> str:
    """A Python function to be completed: signature, docstring and doctest lines."""
    task = _task(rng)
    name = rng.choice((_function_name(task), "solve", "process", "transform", _function_name(task)))
    kind, result = rng.choice(TYPES), rng.choice(TYPES)
    argument = rng.choice(("numbers", "values", "text", "items", "data", "n", "words", "s", "xs"))
    examples = "".join(
        f"    >>> {name}({_value(rng, kind)})\n    {_value(rng, result)}\n" for _ in range(rng.randint(0, 3))
    )
    header = "from typing import Dict, List, Tuple\n\n\n" if rng.random() < 0.6 else ""
    extra = (
        f", {rng.choice(('k: int', 'threshold: float', 'limit: int', 'reverse: bool'))}" if rng.random() < 0.3 else ""
    )
    return (
        f"```python\n{header}def {name}({argument}: {kind}{extra}) -> {result}:\n"
        f'    """ {task[0].upper() + task[1:]}.\n{examples}    """\n```'
    )


def _value(rng: random.Random, kind: str) -> str:
    ints = [rng.randint(-9, 40) for _ in range(rng.randint(0, 5))]
    word = "".join(rng.choice("abcdeilmnorstu") for _ in range(rng.randint(2, 7)))
    return {
        "List[int]": str(ints),
        "List[str]": str([word[: i % 5 + 1] for i in range(len(ints))]),
        "str": repr(word),
        "int": str(rng.randint(-5, 99)),
        "Dict[str, int]": str({word: len(word)}),
        "List[float]": str([i / 2 for i in ints]),
        "Tuple[int, int]": str((rng.randint(0, 9), rng.randint(0, 9))),
        "bool": rng.choice(("True", "False")),
        "float": str(rng.randint(0, 90) / 4),
    }[kind]


def _code(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        lead = rng.choice(
            (
                "Complete this function so that its tests pass:\n",
                "Write the body of the following function:\n",
                "Implement this Python function.\n",
                "Solve this programming problem and check that the examples work:\n",
                "Here is a function signature. Please write a solution that passes the tests:\n",
                "Finish the code below.\n",
                "",
            )
        )
        return lead + _skeleton(rng)
    language = rng.choice(LANGUAGES)
    if kind < 0.75:
        verb, form = rng.choice(("Write", "Create", "Give me", "Implement")), rng.choice(FORMS)
        return f"{verb} a {language} {form} to {_task(rng)}."
    topic = rng.choice(PROJECTS)
    lead = rng.choice(("How do I write", "Show me", "Write", "I need", "Explain with code"))
    return f"{lead} {topic} in {language}{rng.choice(('?', '.', ' with comments.', ' and explain how it works.'))}"


def _writing(rng: random.Random) -> str:
    topic, kind, tone = rng.choice(TOPICS), rng.choice(KINDS), rng.choice(TONES)
    return rng.choice(
        (
            f"Write a {tone} {kind} about {topic}.",
            f"Compose a {kind} on the subject of {topic}. Keep the tone {tone}.",
            f"Help me with a {kind} about {topic}. It should be {tone} and under {rng.randint(5, 40) * 10} words.",
            f"Explain {topic} to a {rng.choice(('child', 'student', 'manager', 'beginner', 'senior engineer'))}.",
            f"What are the main advantages and disadvantages of {topic}?",
            f"Compare {topic} with {rng.choice(TOPICS)}.",
            f"Describe a day in the life of {rng.choice(NAMES)}, who is obsessed with {topic}.",
            f"Outline a {kind} about {topic} with {rng.randint(3, 7)} sections.",
            f"Pretend to be an expert on {topic} and answer: why does it matter?",
            f"Imagine that {topic} vanished overnight. What would happen?",
        )
    )


def _list(rng: random.Random) -> str:
    topic, count = rng.choice(TOPICS), rng.randint(3, 12)
    return rng.choice(
        (
            f"List {count} facts about {topic}.",
            f"Give me {count} tips on {topic}.",
            f"Name {count} common mistakes in {topic} and how to avoid them.",
            f"Make a table of {count} terms about {topic} with a short definition each.",
            f"Create {count} quiz questions about {topic} with answers.",
            f"Plan {count} days of {topic}.",
            f"Suggest {count} titles for a {rng.choice(KINDS)} about {topic}.",
        )
    )


def _sentence(rng: random.Random) -> str:
    one, two = rng.sample(NAMES, 2)
    return rng.choice(
        (
            f"{one} go to the {rng.choice(PLACES)} yesterday and buyed {rng.randint(2, 9)} {rng.choice(THINGS)}.",
            f"The meeting about {rng.choice(TOPICS)} was moved by {one} from 3 pm to {rng.randint(4, 12)} pm.",
            f"{one} told {two} that {rng.choice(TOPICS)} is overrated.",
            f"Our {rng.choice(PLACES)} is closed because the {rng.choice(THINGS)} has not arrived.",
            f"I am writing to let you know that {one} has finished the report on {rng.choice(TOPICS)}.",
        )
    )


def _rewriting(rng: random.Random) -> str:
    text = " ".join(_sentence(rng) for _ in range(rng.randint(1, 4)))
    order = rng.choice(
        (
            "Correct the grammar of this text:",
            f"Rewrite this in a {rng.choice(TONES)} tone:",
            "Summarise the following in one sentence:",
            "Turn this into bullet points:",
            "Rewrite the passage in the future tense:",
            "Translate to French:",
            "Is the sentiment of this text positive, negative or neutral?",
            "Which people and places are named here? Answer as JSON.",
            "Continue the story:",
        )
    )
    return f"{order}\n{text}" if rng.random() < 0.7 else f"{text}\n\n{order.rstrip(':')}."


_MAKERS: tuple[tuple[float, Callable[[random.Random], str]], ...] = (
    (0.24, _story),
    (0.22, _algebra),
    (0.27, _code),
    (0.12, _writing),
    (0.07, _list),
    (0.08, _rewriting),
)


def template_prompts(count: int, seed: int) -> list[str]:
    """`count` user turns; equal ones are not removed here."""
    rng = random.Random(seed)
    shares, makers = zip(*_MAKERS, strict=True)
    return [maker(rng) for maker in rng.choices(makers, shares, k=count)]


LONG_ORDERS = (
    "Summarise the text above.",
    "Rewrite it so that a child understands it.",
    "What are the three most important points?",
    "Find mistakes in the text and correct them.",
    "Write a reply to it.",
    "Turn this into a table.",
    "Continue it in the same style.",
    "Give a critical review of this.",
    "Translate the first paragraph into Spanish.",
    "Write five questions that this text answers, then answer them.",
    "Explain what the code does and improve it.",
    "Add error handling and comments, and return the whole code.",
    "Extract all numbers and say what they mean.",
    "Make it shorter by half.",
    "Which of the claims are doubtful, and why?",
)


def long_prompt(rng: random.Random, texts: Sequence[str]) -> str:
    """An order around one or more documents: how real long prompts are built."""
    order = rng.choice(LONG_ORDERS)
    if len(texts) == 1:
        body = texts[0]
    else:
        label = rng.choice(("Text", "Document", "Answer", "Source", "Draft"))
        body = "\n\n".join(f"{label} {number}:\n{text}" for number, text in enumerate(texts, start=1))
    lead = rng.choice(("", "", f"I am working on {rng.choice(TOPICS)}. ", "Read this carefully.\n", "Context:\n"))
    return f"{lead}{body}\n\n{order}" if rng.random() < 0.6 else f"{order}\n\n{lead}{body}"
