#pragma once
// Which full blocks hold the rows of which beginnings of texts: a trie with a node for each block. A node's key is
// its parent and the block's 16 tokens, compared as they are, so two texts meet in a node only if they
// are equal up to the end of its block. A part of a block, from its first token on, has a node of its own where it was
// added. Blocks stay in the index after their last holder gave them back, until their numbers are taken again: their
// rows are still there.
//
// Pure bookkeeping without memory of blocks; one thread.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "planner/schedule/block_table.h"

namespace poise {

class PrefixIndex {
 public:
  // A beginning of a text in whole blocks. 0 is the empty one. Numbers are never used again.
  using Node = std::uint64_t;
  using Tokens = std::span<const TokenId>;  // 1 to kBlockTokens
  struct Found {
    Node node;
    BlockRef block;
  };

  // The beginning that is `parent` and then these tokens; nothing if no block holds it.
  std::optional<Found> find(Node parent, Tokens tokens) const;
  // `block` holds the rows of `tokens` behind `parent`. Where another block holds them already, that one stays.
  // Returns their node. REQUIRES: forget(block) since it held anything else.
  Node add(Node parent, Tokens tokens, const BlockRef& block);
  // The block's rows are not to be relied on any more.
  void forget(const BlockRef& block);
  // All blocks of this kind and place from number `first` on.
  void forget_from(BlockKind kind, Place place, std::uint32_t first = 0);

  std::size_t size() const { return nodes_.size(); }

 private:
  struct Key {
    Node parent;
    std::array<TokenId, static_cast<std::size_t>(kBlockTokens)> tokens;  // -1 behind a part
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const;
  };
  static Key key_of(Node parent, Tokens tokens);

  std::unordered_map<Key, Found, Hash> nodes_;
  std::array<std::unordered_map<std::uint32_t, std::vector<Key>>, kPools>
      by_block_;  // by its number
  Node last_ = 0;
};

}  // namespace poise
