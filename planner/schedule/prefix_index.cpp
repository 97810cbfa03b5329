#include "planner/schedule/prefix_index.h"

#include <algorithm>

namespace poise {

std::size_t PrefixIndex::Hash::operator()(const Key& key) const {
  std::uint64_t hash = key.parent * 0x9e3779b97f4a7c15ull;
  for (const TokenId token : key.tokens) {
    hash = (hash ^ static_cast<std::uint64_t>(static_cast<std::uint32_t>(token))) *
           0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

PrefixIndex::Key PrefixIndex::key_of(Node parent, Tokens tokens) {
  Key key{.parent = parent, .tokens = {}};
  const auto end = std::ranges::copy(tokens, key.tokens.begin()).out;
  std::fill(end, key.tokens.end(), TokenId{-1});
  return key;
}

std::optional<PrefixIndex::Found> PrefixIndex::find(Node parent, Tokens tokens) const {
  const auto found = nodes_.find(key_of(parent, tokens));
  return found == nodes_.end() ? std::nullopt : std::optional(found->second);
}

PrefixIndex::Node PrefixIndex::add(Node parent, Tokens tokens, const BlockRef& block) {
  const Key key = key_of(parent, tokens);
  if (const auto there = nodes_.find(key); there != nodes_.end()) {
    return there->second.node;
  }
  nodes_.emplace(key, Found{.node = ++last_, .block = block});
  by_block_[pool_index(block.kind, block.place)][block.number.n].push_back(key);
  return last_;
}

void PrefixIndex::forget(const BlockRef& block) {
  auto& blocks = by_block_[pool_index(block.kind, block.place)];
  if (const auto found = blocks.find(block.number.n); found != blocks.end()) {
    for (const Key& key : found->second) {
      nodes_.erase(key);
    }
    blocks.erase(found);
  }
}

void PrefixIndex::forget_from(BlockKind kind, Place place, std::uint32_t first) {
  std::erase_if(by_block_[pool_index(kind, place)], [&](const auto& one) {
    if (one.first < first) {
      return false;
    }
    for (const Key& key : one.second) {
      nodes_.erase(key);
    }
    return true;
  });
}

}  // namespace poise
