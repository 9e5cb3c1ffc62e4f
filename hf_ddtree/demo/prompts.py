"""The example prompts of the page, by their label."""

_CLASS = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""

EXAMPLES = {
    "Write a function": "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Explain": "Explain in simple words why the sky is blue.",
    "Tell a story": "Tell a short story about a lighthouse keeper and a lost whale.",
    "Add docstrings": f"Add a docstring to each method of this class:\n\n```python\n{_CLASS}```",
    # the spelling mistakes are intended
    "Correct a text": "Correct the spelling and repeat the text: The libary opens at nine in the morning and closes at "
    "six in the evning. On Sundays the libary is closed, but the readng room stays open.",
}
