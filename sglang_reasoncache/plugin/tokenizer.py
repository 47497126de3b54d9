# SPDX-License-Identifier: Apache-2.0
"""What a scheduler process reads from the model's tokenizer: texts of tokens, and markers of reasoning."""

import dataclasses
import logging
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.arguments import SET
from sglang_reasoncache.compat.types import TreeCacheBuildContext
from sglang_reasoncache.config import ReasonCacheConfig, ResolvedConfig, filter_config
from sglang_reasoncache.filter.segment import ReasoningMarkers
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of
from sglang_reasoncache.plugin.reasoning import reasoning_markers

logger = logging.getLogger(__name__)


def tokenizer_of(context: TreeCacheBuildContext) -> Any:
    """The model's tokenizer, which steps and markers of reasoning need. With ``--skip-tokenizer-init`` SGLang's
    schedulers load none, so we do. None, and a line in the log, if it cannot be loaded."""
    if context.tp_worker.tokenizer is not None:
        return context.tp_worker.tokenizer
    serving = compat.get_serving()
    model = compat.get_model()
    try:
        return compat.get_tokenizer(
            serving.tokenizer_path,
            tokenizer_mode=serving.tokenizer_mode,
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
            tokenizer_backend=serving.tokenizer_backend,
        )
    except Exception as error:
        # The code of a custom tokenizer may raise anything.
        logger.warning(
            "reasoncache: --skip-tokenizer-init is set, and the plugin cannot load --tokenizer-path %s either, "
            "so no --reasoning-parser is followed: %s",
            serving.tokenizer_path,
            error,
        )
        return None


def settle_vocabulary(
    resolved: ResolvedConfig, tokenizer: Any
) -> tuple[ResolvedConfig, Vocabulary]:
    """The vocabulary of ``tokenizer``; without pieces if it cannot be read. The filter then finds equal runs by
    token ids alone. What compares steps needs their texts: nothing is shared then, and the returned settings
    say why. A line in the log tells either."""
    config = resolved.config
    if not config.shares:
        return resolved, Vocabulary(())
    why = "there is no tokenizer"
    if tokenizer is not None:
        try:
            return resolved, vocabulary_of(tokenizer)
        except ValueError as error:
            why = str(error)
    if config.match == "runs" and config.random_ratio is None:
        logger.warning(
            "reasoncache: %s; --enable-reasoncache finds equal runs by token ids alone and compares every %d "
            "tokens, because blank lines are unknown",
            why,
            filter_config(config).longest_step,
        )
        return resolved, Vocabulary(())
    name = "match" if config.random_ratio is None else "random_ratio"
    why = f"{why}, and {SET} {name}={getattr(config, name)} needs the text of steps"
    logger.warning(
        "reasoncache: nothing is shared, because: %s; --reasoncache-preset newest does not need it",
        why,
    )
    settings = dataclasses.replace(config, percentile=0)
    return dataclasses.replace(resolved, config=settings, uncorrected=why), Vocabulary(())


def markers_of(
    parser: str | None, tokenizer: Any, config: ReasonCacheConfig
) -> ReasoningMarkers | None:
    """The tokens that start and end reasoning. None if all output may share. Raises ValueError if
    ``config.span`` is ``reasoning`` and these tokens are unknown."""
    if config.span == "response":
        return None
    markers = reasoning_markers(parser, tokenizer)
    if markers is None and config.span == "reasoning":
        raise ValueError(
            "--reasoncache-span reasoning needs a --reasoning-parser whose markers are single "
            f"tokens of the model, got {parser!r}"
        )
    return markers
