"""How texts begin that a target writes: whole questions, as people type them, and first words.

Plain data and one function; called by the writers (`synth.py`, `continuations.py`). A small model that makes up a
question from first words wanders; whole questions stay with what a person would ask, and so do their answers. First
words make the text range over chat, code, summaries, sums and lists.
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

# Fraction of asks of each form, its tasks and its topics.
_FORMS = (
    (0.5, TOPIC_TASKS, TOPICS),
    (0.25, FUNCTION_TASKS, FUNCTIONS),
    (0.1, LETTER_TASKS, LETTERS),
    (0.15, PAIR_TASKS, PAIRS),
)


def draw_ask(random: torch.Generator) -> str:
    """A whole question: a form by its fraction, then a task and a topic evenly."""
    draws = torch.rand(3, generator=random).tolist()
    form = 0
    while draws[0] >= _FORMS[form][0] and form + 1 < len(_FORMS):
        draws[0] -= _FORMS[form][0]
        form += 1
    _, tasks, topics = _FORMS[form]
    return tasks[int(draws[1] * len(tasks))].format(topics[int(draws[2] * len(topics))])


CHAT = (
    "What is", "What are the", "What is the difference between", "What is the best way to",
    "What happens when", "What should I", "What does it mean", "Why is", "Why do", "Why does", "Why are",
    "How do I", "How can I", "How does", "How do", "How would you explain", "How many",
    "How long does it take to", "Who was", "Who invented", "When did", "Where is", "Where can I", "Which",
    "Is it", "Is there a", "Are there", "Can you", "Can you help me", "Could you", "Could you explain",
    "Do you know", "Does", "Should I", "Tell me about", "Tell me a", "Give me advice on", "I am trying to",
    "I want to learn", "I need help with", "I have a question about", "I'm planning a", "I'm feeling",
    "I'm a student", "I would like to know", "My friend", "My boss", "My daughter", "My computer", "Hi",
    "Hello,", "Hey,", "Good morning", "Thanks", "Please", "Please explain", "Explain", "Explain why",
    "Explain how", "Explain the concept of", "Explain in simple terms", "Describe",
    "Describe the process of", "Describe how", "Discuss", "Compare", "Define", "Let's talk about",
    "Imagine", "In what ways", "If I", "If you could", "Suppose",
)  # fmt: skip

CODE = (
    "def ", "import ", "class ", "Write a Python function", "Write a Python function that",
    "Write a Python program to", "Write a function that returns", "Write a function to check if",
    "Write a JavaScript function", "Write a SQL query", "Write a C++ program", "Write a bash script",
    "Write unit tests for", "Write a regular expression", "Write HTML", "How do I sort a list in Python",
    "How do I reverse a string", "How to read a file in Python", "Fix this code:",
    "What is wrong with this code:", "Explain this code:", "What does this function do:", "Refactor",
    "Implement", "Implement a stack", "Implement binary search", "Create a Python class",
    "Create a function", "Convert this", "Given an array", "Given a list of integers", "Given a string",
    "Using Python,", "In Python,", "In Java,", "Complete the function:", "Here is my Python code:",
    "I'm getting an error in my Python code", "What is the time complexity of", "Debug",
    "Design an algorithm", "Develop a", "Build a simple",
)  # fmt: skip

SUMMARY = (
    "Summarize", "Summarize the following text:", "Summarize the following article:",
    "Summarize this paragraph:", "Summarize in one sentence:", "Give a short summary of",
    "What are the main points of", "Rewrite", "Rewrite the following sentence",
    "Rewrite this email to be more polite:", "Paraphrase", "Shorten this text:",
    "Extract the key points from", "Edit the following paragraph", "Correct the grammar:",
    "Make this more concise:", "Turn these notes into", "Translate", "Translate to French:", "Classify",
    "Identify the", "Read the passage", "The following is an article about", "Here is a text:",
    "Based on the text", "Provide a brief overview of",
)  # fmt: skip

SUMS = (
    "Calculate", "Solve", "Solve for x:", "What is 12", "What is the sum of", "What is the area of",
    "Find the", "Find the value of", "If a train", "If John has", "A store sells", "A rectangle has",
    "There are", "Sarah has", "Tom bought", "Convert", "How many minutes", "What is the square root of",
    "Prove that", "Simplify", "Evaluate", "A car travels", "What percentage of", "The average of",
    "Mary has", "In a class of",
)  # fmt: skip

LISTS = (
    "List", "List three", "List five", "List the", "List 10", "Give me a list of", "Give me five",
    "Give three examples of", "Name", "Name five", "Name three", "Suggest", "Suggest some", "Recommend",
    "Create a list of", "Provide", "Provide a step-by-step guide", "What are some", "What are five",
    "What are the benefits of", "What are the steps to", "Brainstorm", "Create a table", "Generate a",
    "Make a list of", "Plan a", "Create a weekly", "Outline",
)  # fmt: skip

WRITING = (
    "Write", "Write a", "Write a short story about", "Write a poem about", "Write an email to",
    "Write a letter to", "Write a paragraph about", "Write a blog post about",
    "Write a product description for", "Write a speech", "Write a haiku", "Write a dialogue between",
    "Write an essay on", "Write a review of", "Write instructions for", "Write a news headline", "Compose",
    "Create a", "Create a story about", "Draft", "Draft a", "Design a", "Come up with",
    "Continue the story:", "Once upon a time", "Tell me a story about", "Tell me a joke about", "Craft a",
    "Develop a character", "Help me write",
)  # fmt: skip

STEMS: tuple[str, ...] = CHAT + CODE + SUMMARY + SUMS + LISTS + WRITING
