"""Whole user turns, each a task put to a topic, as people type them.

Plain data and one function; called by :mod:`paceline.training.synth`. Turns that the target makes up from a stem
wander as small models do; these keep to what a person would ask, so that answers do too.
"""

from __future__ import annotations

import torch

TOPICS = (
    "the water cycle", "photosynthesis", "inflation", "black holes", "the French Revolution", "vaccines",
    "electric cars", "jazz music", "the immune system", "compound interest", "coral reefs", "chess",
    "meditation", "solar panels", "the human heart", "earthquakes", "the printing press", "sourdough bread",
    "the Great Wall of China", "machine learning", "gravity", "glaciers", "recycling", "the stock market",
    "tides", "antibiotics", "the Roman Empire", "climate change", "whales", "public transport",
    "time zones", "the Olympic Games", "rainbows", "memory", "nuclear power", "bridges", "coffee", "tea",
    "chocolate", "the Moon", "Mars", "dinosaurs", "insulin", "the internet", "lightning", "dreams",
    "migration of birds", "wind turbines", "the Renaissance", "democracy", "supply and demand", "rust",
    "magnets", "the ozone layer", "fermentation", "soap", "glass", "paper", "steel", "concrete", "cotton",
    "batteries", "telescopes", "microscopes", "airplanes", "submarines", "elevators", "traffic lights",
    "maps", "calendars", "clocks", "money", "taxes", "insurance", "mortgages", "budgeting", "gardening",
    "houseplants", "composting", "yoga", "swimming", "hiking", "stretching", "healthy eating", "vitamins",
    "learning a language", "playing the guitar", "painting with watercolours", "photography", "knitting",
    "public speaking", "time management", "remote work", "teamwork", "email etiquette", "note taking",
    "studying for an exam", "moving to a new city", "adopting a dog", "caring for a cat", "a road trip",
    "a birthday party", "a picnic", "camping", "a vegetable soup", "an omelette", "a chocolate cake",
    "a green salad", "rice", "pasta with tomato sauce", "Shakespeare", "Mozart", "Leonardo da Vinci",
    "Marie Curie", "Albert Einstein", "Charles Darwin", "Cleopatra", "Nelson Mandela", "Isaac Newton",
    "Japan", "Brazil", "Egypt", "Canada", "Australia", "India", "Kenya", "Norway", "the Amazon rainforest",
    "the Sahara", "the Himalayas", "the Pacific Ocean", "Antarctica", "the Great Barrier Reef",
)  # fmt: skip

TOPIC_TASKS = (
    "What is {}?", "Tell me about {}.", "Explain {} in simple terms.", "Explain {} to a child.",
    "Explain {} in two or three sentences.", "How does {} work?", "Why is {} important?",
    "Give me three interesting facts about {}.", "Give me five tips about {}.",
    "What should a beginner know about {}?", "What are the main advantages and disadvantages of {}?",
    "Write a short paragraph about {}.", "Write a short poem about {}.",
    "Write a short story about {}.", "List the most important things to know about {}.",
    "What are common mistakes people make with {}?", "Describe {} briefly.",
    "What is the history of {}?", "Write a quiz of three questions about {} with answers.",
    "I know nothing about {}. Where do I start?", "Can you summarise what is known about {}?",
    "Write an outline for a talk about {}.", "How has {} changed over time?",
    "What questions should I ask about {}?", "What is a common myth about {}?",
    "Write a title and an introduction for an article about {}.",
)  # fmt: skip

FUNCTIONS = (
    "adds two numbers", "checks whether a number is prime", "returns the factorial of a number",
    "counts the vowels in a string", "sorts a list of numbers", "finds the smallest number in a list",
    "removes duplicates from a list", "checks whether a word is a palindrome", "merges two sorted lists",
    "computes the average of a list", "returns the first n Fibonacci numbers", "reads a file line by line",
    "converts Celsius to Fahrenheit", "finds the common elements of two lists", "flattens a nested list",
    "computes the greatest common divisor", "capitalises every word in a sentence", "parses a CSV file",
    "counts the lines in a file", "validates an email address", "groups words by their first letter",
    "returns the longest word in a sentence", "computes the sum of digits of a number",
    "searches a sorted list", "rotates a list by k places", "downloads a web page", "writes a log message",
    "checks whether two strings are anagrams", "transposes a matrix", "generates a random password",
    "converts a number to binary", "measures how long another function takes", "retries a failing call",
)  # fmt: skip

FUNCTION_TASKS = (
    "Write a Python function that {}.", "Write a Python function that {}. Include a docstring.",
    "Write a JavaScript function that {}.", "Write a Python script that {} and explain it.",
    "Show me how to write a function that {}, with an example.", "In Python, write code that {}.",
    "Write a Python function that {} and write tests for it.", "Write a Java method that {}.",
    "How do I write a function that {}?",
)  # fmt: skip

LETTERS = (
    "asking a colleague for help with a report", "thanking a teacher for their support",
    "inviting friends to dinner on Saturday", "asking for a day off", "cancelling a gym membership",
    "complaining about a late delivery", "applying for a summer job", "asking a professor for an extension",
    "congratulating a friend on a new job", "rescheduling a meeting", "asking a neighbour to be quieter",
    "introducing a new member of the team", "following up after an interview", "requesting a refund",
    "apologising for a mistake in an invoice", "announcing that the office will be closed",
)  # fmt: skip

LETTER_TASKS = ("Write a polite email {}.", "Write a short letter {}.", "Draft a friendly message {}.")

PAIRS = (
    "cats and dogs", "tea and coffee", "books and films", "trains and planes", "Python and JavaScript",
    "renting and buying a home", "fruit and vegetables", "summer and winter", "solar and wind energy",
    "city life and country life", "yoga and weight training", "lists and tuples in Python",
    "SQL and NoSQL databases", "a virus and a bacterium", "weather and climate", "mass and weight",
    "credit cards and debit cards", "a comet and an asteroid", "novels and short stories",
    "online and classroom learning", "electric and petrol cars", "wood and steel as building materials",
)  # fmt: skip

PAIR_TASKS = (
    "Compare {}.", "What is the difference between {}?", "Name two similarities and two differences of {}.",
    "Make a table that compares {}.", "Which would you choose, and why: {}?",
)  # fmt: skip

# Share of asks of each form, its tasks and its topics.
_FORMS = (
    (0.5, TOPIC_TASKS, TOPICS),
    (0.25, FUNCTION_TASKS, FUNCTIONS),
    (0.1, LETTER_TASKS, LETTERS),
    (0.15, PAIR_TASKS, PAIRS),
)


def draw_ask(random: torch.Generator) -> str:
    """One ask: a form by its share, then a task and a topic evenly."""
    draws = torch.rand(3, generator=random).tolist()
    form = 0
    while draws[0] >= _FORMS[form][0] and form + 1 < len(_FORMS):
        draws[0] -= _FORMS[form][0]
        form += 1
    _, tasks, topics = _FORMS[form]
    return tasks[int(draws[1] * len(tasks))].format(topics[int(draws[2] * len(topics))])
