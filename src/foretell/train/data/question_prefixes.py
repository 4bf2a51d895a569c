"""First words of the questions that a model writes: without them a small chat model writes a few kinds only."""

QUESTION_PREFIXES: tuple[str, ...] = (
    # Writing
    "Write a short story about", "Write a poem about", "Write an email to", "Write a blog post about",
    "Compose a letter", "Draft a speech", "Describe a scene in which", "Write a product description for",
    "Write a persuasive", "Imagine you are writing a", "Rewrite the following", "Edit this paragraph",
    "Give me a catchy title for", "Write a diary entry", "Write a review of",
    # Playing a part
    "Pretend you are", "You are a", "Act as a", "Imagine that you are", "Take on the role of", "Speak as if you were",
    "Let's play a game:",
    # Reasoning
    "If all", "Imagine a race", "A farmer has", "Which of the following", "There are three", "Suppose that",
    "Is it true that", "What comes next", "Why does", "A family",
    # Mathematics
    "Solve the equation", "What is the value of", "Calculate", "A train travels", "If a store sells", "John has",
    "Find the area", "Maria bought", "How many", "The sum of", "A rectangle", "What is the probability", "Tom is",
    "Each week", "A bakery", "Twice as many",
    # Code
    "Write a Python function that", "Write a function to", "Implement", "def ", "Write a program that",
    "Fix the bug in this code:", "Write a SQL query", "Write a C++ program", "Write a JavaScript",
    "Explain what this code does:", "How do I sort", "Create a class", "Write a regular expression",
    "Write a bash script",
    # Extraction
    "Extract", "Given the following", "Identify the", "From the text below", "List all",
    "Read the following passage and", "Count how many", "Return the answer as JSON.", "Classify",
    "Evaluate the following", "Analyze the following",
    # Science and engineering
    "Explain", "What is the difference between", "How does", "What causes", "Describe the process of",
    "What are the main", "In chemistry,", "In physics,", "What is machine learning", "In computer science,",
    # Humanities
    "Discuss", "Compare", "What were the causes of", "Who was", "Provide an overview of", "What role did", "How did",
    "What are the benefits of", "Create a lesson plan", "What is the history of",
    # Translation
    "Translate the following sentence into", "Translate from German to English:", "Translate German to English:",
    "Translate to English:", "How do you say",
    # Summaries
    "Summarize the following", "Summarize:", "Give me a summary of this article:",
    "Summarize this text in two sentences:", "TL;DR",
    # Questions of fact
    "who", "when did", "where is", "what is", "how long", "which", "when was", "what does", "who wrote", "what year",
    # Questions on documents
    "Answer the question based on the following documents.", "Use the context below to answer:", "Context:", "Passage:",
    "Based on the information provided,", "Title:",
)  # fmt: skip
"""Tasks that assistants commonly get. One third of the questions have no prefix; the others use these in turn."""
