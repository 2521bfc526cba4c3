"""A process that tokenizes: pickled lists of UTF-8 texts come in on stdin, ids and counts go out on stdout.

Run as a script with the path of a tokenizer.json. It imports nothing of shardwise, so that it starts at once.
"""

import pickle
import sys

import numpy as np
from tokenizers import Tokenizer


def main(file: str) -> None:
    """Answers until stdin closes: (ids uint32, counts int64) as bytes, or a str that says what failed."""
    tokenizer = Tokenizer.from_file(file)
    tokenizer.encode_special_tokens = True
    while True:
        try:
            texts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[bytes, bytes] | str
        try:
            encoded = tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
            ids = [np.array(one.ids, np.uint32) for one in encoded]
            counts = np.array([one.size for one in ids], np.int64)
            answer = (np.concatenate(ids).tobytes(), counts.tobytes())
        except Exception as error:
            answer = str(error)
        pickle.dump(answer, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
