"""The Gradio page. Not written yet; this says what is coming."""

if __name__ == "__main__":
    print(
        "The page is not there yet. It will generate with and without a tree side by side, and show the tree of every\n"
        "round. Until then: make demo"
    )
