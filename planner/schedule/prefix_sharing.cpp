#include "planner/schedule/prefix_sharing.h"

#include <algorithm>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::int32_t kLeastPart = 8;  // one part in so many of its rows is worth an iteration

PrefixIndex::Tokens tokens_of(std::span<const TokenId> prompt, std::int32_t block) {
  return prompt.subspan(static_cast<std::size_t>(block) * kBlockTokens,
                        static_cast<std::size_t>(kBlockTokens));
}

// Of the block that `tokens` of the prompt cut.
PrefixIndex::Tokens part_of_block(std::span<const TokenId> prompt, std::int32_t tokens) {
  const auto end = static_cast<std::size_t>(tokens);
  const auto part = static_cast<std::size_t>(tokens % kBlockTokens);
  return prompt.subspan(end - part, part);
}

std::int32_t full_blocks(std::size_t tokens) {
  return static_cast<std::int32_t>(tokens / static_cast<std::size_t>(kBlockTokens));
}

constexpr std::uint64_t kEmptyDigest = 0xcbf29ce484222325ull;

std::uint64_t digest_behind(std::uint64_t digest, PrefixIndex::Tokens tokens) {
  for (const TokenId token : tokens) {
    digest =
        (digest ^ static_cast<std::uint64_t>(static_cast<std::uint32_t>(token))) * 0x100000001b3ull;
    digest ^= digest >> 32;
  }
  return digest;
}

// Of all full blocks: each goes on from the one before.
std::vector<std::uint64_t> digests_of(std::span<const TokenId> prompt) {
  std::vector<std::uint64_t> digests(static_cast<std::size_t>(full_blocks(prompt.size())));
  for (std::size_t i = 0; i < digests.size(); ++i) {
    digests[i] = digest_behind(i == 0 ? kEmptyDigest : digests[i - 1],
                               tokens_of(prompt, static_cast<std::int32_t>(i)));
  }
  return digests;
}

const std::vector<std::uint64_t>& digests_in(PrefixChain& chain, std::span<const TokenId> prompt) {
  if (chain.digests.empty()) {
    chain.digests = digests_of(prompt);
  }
  return chain.digests;
}

// Of the part's most tokens. REQUIRES: they cut a block.
std::uint64_t digest_of_cut(const SharedPart& part, PrefixChain& chain) {
  const std::vector<std::uint64_t>& digests = digests_in(chain, part.prompt);
  const std::int32_t before = part.most_tokens / kBlockTokens;
  return digest_behind(before == 0 ? kEmptyDigest : digests[static_cast<std::size_t>(before) - 1],
                       part_of_block(part.prompt, part.most_tokens));
}

// Whether the block that the part ends in is one of which others can take a part over.
bool gives_part(const SharedPart& part, const ContextBlocks& context) {
  const auto at = static_cast<std::size_t>(part.most_tokens / kBlockTokens);
  return at < context.blocks().size() && context.blocks()[at].kind == BlockKind::kv &&
         context.blocks()[at].place == Place::host;
}

}  // namespace

void PrefixSharing::take_over(const SharedPart& part, PrefixChain& chain, ContextBlocks& context,
                              BlockPools& pools) {
  check(context.stored() == context.room(), "rows fill the blocks before shared ones");
  if (chain.blocks != context.size()) {  // its own rows are in no index
    return;
  }
  const std::int32_t most = part.most_tokens / kBlockTokens;
  while (chain.blocks < most) {
    const auto found = index_.find(chain.node, tokens_of(part.prompt, chain.blocks));
    if (!found) {
      return;
    }
    take(*found, kBlockTokens, context, pools);
    chain.node = found->node;
    ++chain.blocks;
  }
  if (part.cuts_a_block() && part.at_once && chain.blocks == most) {
    if (const auto found = index_.find(chain.node, part_of_block(part.prompt, part.most_tokens))) {
      take(*found, part.most_tokens % kBlockTokens, context, pools);
      chain.has_part = true;
    }
  }
}

void PrefixSharing::take(const PrefixIndex::Found& found, std::int32_t tokens,
                         ContextBlocks& context, BlockPools& pools) {
  if (!pools.take(found.block)) {  // it has a holder
    pools.share(found.block);
  }
  context.append(found.block);
  context.mark_stored(tokens);
  tokens_ += tokens;
}

bool PrefixSharing::waits(const SharedPart& part, PrefixChain& chain, std::int32_t rows) const {
  if (coming_.empty()) {
    return false;
  }
  const std::vector<std::uint64_t>& digests = digests_in(chain, part.prompt);
  std::int32_t end = chain.blocks;
  while (end < part.most_tokens / kBlockTokens &&
         coming_.contains(digests[static_cast<std::size_t>(end)])) {
    ++end;
  }
  std::int64_t shared = std::int64_t{end - chain.blocks} * kBlockTokens;
  if (part.cuts_a_block() && part.at_once && end == part.most_tokens / kBlockTokens &&
      coming_.contains(digest_of_cut(part, chain))) {
    shared += part.most_tokens % kBlockTokens;
  }
  return shared > 0 && shared * kLeastPart >= rows;
}

void PrefixSharing::runs(const SharedPart& part, PrefixChain& chain, const ContextBlocks& context) {
  if (chain.has_part) {  // it stores nothing that another could take over
    return;
  }
  const std::vector<std::uint64_t>& digests = digests_in(chain, part.prompt);
  for (auto i = static_cast<std::size_t>(context.stored() / kBlockTokens); i < digests.size();
       ++i) {
    coming_.insert(digests[i]);
  }
  if (part.cuts_a_block() && context.stored() < part.most_tokens && gives_part(part, context)) {
    coming_.insert(digest_of_cut(part, chain));
  }
}

void PrefixSharing::stored(const SharedPart& part, PrefixChain& chain,
                           const ContextBlocks& context) {
  const std::span<const TokenId> prompt = part.prompt;
  const std::int32_t full = std::min(full_blocks(prompt.size()),
                                     context.stored() / static_cast<std::int32_t>(kBlockTokens));
  while (true) {
    const auto at = static_cast<std::size_t>(chain.blocks);
    if (part.cuts_a_block() && chain.blocks == part.most_tokens / kBlockTokens &&
        context.stored() >= part.most_tokens && gives_part(part, context)) {
      index_.add(chain.node, part_of_block(prompt, part.most_tokens), context.blocks()[at]);
    }
    if (chain.blocks >= full) {
      return;
    }
    add(prompt, chain, context.blocks()[at]);
  }
}

void PrefixSharing::add(std::span<const TokenId> prompt, PrefixChain& chain,
                        const BlockRef& block) {
  chain.node = index_.add(chain.node, tokens_of(prompt, chain.blocks), block);
  ++chain.blocks;
}

bool PrefixSharing::holds(std::span<const TokenId> prompt, const PrefixChain& chain,
                          const BlockRef& block) const {
  if (chain.blocks >= full_blocks(prompt.size())) {
    return false;
  }
  const auto found = index_.find(chain.node, tokens_of(prompt, chain.blocks));
  return found && found->block == block;
}

void PrefixSharing::lose_device() {
  index_.forget_from(BlockKind::act, Place::gpu);
  index_.forget_from(BlockKind::kv, Place::gpu);
}

void PrefixSharing::move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks) {
  index_.forget_from(BlockKind::act, Place::host, act_blocks);
  index_.forget_from(BlockKind::kv, Place::host, kv_blocks);
}

}  // namespace poise
