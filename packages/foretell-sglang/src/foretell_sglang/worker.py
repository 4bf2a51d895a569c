"""SGLang's worker of the algorithm NGRAM with trees of Foretell."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from foretell_sglang.trees import TreeDrafter


def worker_class(options: Mapping[str, Any]) -> type:
    """A subclass of SGLang's `NGRAMWorker` that drafts by these options."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker  # SGLang needs a GPU.

    class ForetellWorker(NGRAMWorker):  # type: ignore[misc]
        """Takes trees from a `TreeDrafter`; verification and everything else are SGLang's."""

        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
            tokenizer = server_args.tokenizer_path or server_args.model_path
            vocab = target_worker.model_runner.model_config.vocab_size
            self.ngram_corpus = TreeDrafter(options, self.draft_token_num, vocab, tokenizer)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            # With overlap the tokens of the last step are not yet among the output of a request.
            late = [list[int]() for _ in batch.reqs]
            if self.enable_overlap and not batch.grammar_needs_sync():
                counts = batch.spec_info.accept_lens.tolist()
                rows = batch.spec_info.accept_tokens.reshape(len(counts), self.draft_token_num).tolist()
                late = [tokens[:count] for tokens, count in zip(rows, counts, strict=True)]
            texts = []
            for request, tokens in zip(batch.reqs, late, strict=True):
                prompt, known = request.origin_input_ids_unpadded, self.ngram_corpus.known(request.rid)
                length = len(prompt) + len(request.output_ids) + len(tokens)
                first = known - len(prompt) if known < length else -1
                shown = [*prompt, *request.output_ids] if first < 0 else request.output_ids[first:]
                texts.append((request.rid, [*shown, *tokens], length))
            return self.ngram_corpus.draft(texts)

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Nothing: texts are read where they are drafted for."""

    return ForetellWorker
