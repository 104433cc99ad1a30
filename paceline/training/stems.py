"""First words of user turns, so that what the target writes ranges over chat, code, summaries, sums and lists.

Plain data; called by :mod:`paceline.training.synth`. An empty stem lets the target begin the turn on its own.
"""

from __future__ import annotations

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
