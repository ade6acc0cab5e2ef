"""Ask the language model (no picture) some ordinary questions, greedily, with llama.cpp,
and keep its short answers: train.py mixes them in, so that a picture in the context
does not turn every question into one about shapes.

    python smalltalk.py SmolLM2-135M-Instruct.Q4_1.gguf smalltalk.json
"""

import json
import sys

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is the capital of Japan?",
    "What is 2 + 2?",
    "What is 3 + 5?",
    "Say hello.",
    "Hello!",
    "Hi",
    "Thank you!",
    "Who are you?",
    "What is your name?",
    "How are you?",
    "Tell me a fun fact about cats.",
    "What do bees make?",
    "What is the opposite of hot?",
    "Name a fruit.",
    "Name three animals.",
    "Translate 'good morning' to Spanish.",
    "Translate 'dog' to French.",
    "What day comes after Monday?",
    "How many days are in a week?",
    "What is water made of?",
    "Who wrote Hamlet?",
    "What is the largest ocean?",
    "Spell the word cat.",
    "Write a short sentence about the sea.",
    "What is Python?",
    "Give me a synonym for happy.",
    "What is the boiling point of water?",
    "Finish the sentence: The sun is",
    "Good night!",
    "What is the fastest animal on land?",
    "What do cows drink?",
    "Write one word.",
    "What is a noun?",
    "Which planet do we live on?",
    "What is the square root of 16?",
    "Count from one to five.",
]

if __name__ == "__main__":
    from llama_cpp import Llama

    llm = Llama(sys.argv[1], n_ctx=1024, verbose=False, n_threads=1)
    out = []
    for q in QUESTIONS:
        r = llm.create_chat_completion(
            [{"role": "user", "content": q}], max_tokens=48, temperature=0.0, repeat_penalty=1.0
        )
        c = r["choices"][0]
        t = c["message"]["content"]
        if c["finish_reason"] == "stop" and t.isascii() and 0 < len(t) < 180:
            out.append([q, t])
    json.dump(out, open(sys.argv[2], "w"), indent=1)
    print(len(out), "kept of", len(QUESTIONS))
