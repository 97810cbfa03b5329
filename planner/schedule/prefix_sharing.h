#pragma once
// Requests whose prompts begin alike share the full blocks of what they have in common (--prefix-sharing). Once an
// iteration has stored a full block of a prompt, its rows never change, and they are the rows that any other
// request with the same tokens before and in it would store. So a later request takes the block over, and its
// rows begin behind it. Both hold the block; who gives it back last frees it, and it can still be taken over
// until its number is taken anew. A block keeps the kind and place that its first holder gave it.
//
// A request that ends with its prompt, since it only scores tokens, also takes over a part of a block: rows of a KV block
// of the host up to the first that it has to run. It reads them in a slot of its own, where its next rows stand behind
// them; those are stored nowhere, and nothing reads them later. So four answers to a question compute it once, however
// short it is.
//
// A request whose next blocks an older one is about to store does not run in this iteration, if they are at least
// an eighth of what it would compute; behind a prompt of several iterations it waits for each of them. It waits only where an older request runs a part of its prompt in the
// same iteration, so it never waits for a request that was cancelled, preempted, or may not run.
//
// Not shared are blocks that a request keeps nowhere (token-recompute), those whose logits it wants, and the blocks of
// requests that host cores attend. Where layers have a sliding window, or rotary positions depend on the prompt's length,
// nothing is. A function of the calls made, without clock or log; one thread.

#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "planner/schedule/block_table.h"
#include "planner/schedule/prefix_index.h"

namespace poise {

// How far a request's context is in the index.
struct PrefixChain {
  std::int32_t blocks = 0;  // its first ones, all full and of the prompt, are node `node`
  PrefixIndex::Node node = 0;
  std::int32_t told = 0;  // tokens at its beginning whose rows or ids orders have named
  bool has_part = false;  // its last block is another's, of which it took over the first rows
  std::vector<std::uint64_t>
      digests;  // of the prompt up to the end of each full block; made when first needed

  // The request has no blocks any more.
  void restart() { blocks = 0, node = 0, told = 0, has_part = false; }
  // Its blocks may have left the index.
  void leave_index() { blocks = 0, node = 0; }
};

// What a request could share.
struct SharedPart {
  std::span<const TokenId> prompt;
  std::int32_t most_tokens = 0;  // of its beginning: the rows behind them it has to run itself
  bool ends = false;             // it ends with its prompt
  bool at_once = false;          // … all rows behind most_tokens can run in one iteration

  bool cuts_a_block() const { return ends && most_tokens % kBlockTokens != 0; }
};

class PrefixSharing {
 public:
  void begin_iteration() { coming_.clear(); }
  // Appends to `context` every block behind its rows that holds the part's next tokens. REQUIRES: the rows in
  // `context` fill its blocks.
  void take_over(const SharedPart& part, PrefixChain& chain, ContextBlocks& context,
                 BlockPools& pools);
  // Whether older requests of this iteration are about to store enough of what this one would compute; `rows`: all
  // that it has to compute.
  bool waits(const SharedPart& part, PrefixChain& chain, std::int32_t rows) const;
  // A request runs the rows of its prompt behind those in `context`, some or all, in this iteration, and has blocks for them.
  void runs(const SharedPart& part, PrefixChain& chain, const ContextBlocks& context);
  // The rows in `context` are stored; the prompt's full blocks can be taken over from now on. REQUIRES: its last
  // block is no part of another's.
  void stored(const SharedPart& part, PrefixChain& chain, const ContextBlocks& context);

  // The same of the prompt's next full block alone.
  void add(std::span<const TokenId> prompt, PrefixChain& chain, const BlockRef& block);

  // The block was taken anew: others' rows will be written to it.
  void taken(const BlockRef& block) { index_.forget(block); }
  // Whether `block` is what the index has behind the chain for the prompt's next tokens: the request may hold it, too.
  bool holds(std::span<const TokenId> prompt, const PrefixChain& chain,
             const BlockRef& block) const;
  // What was on the device is lost. REQUIRES: every chain leaves the index.
  void lose_device();
  // The host's pools end there.
  void move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks);

  // Tokens whose rows were taken over, instead of being computed.
  std::int64_t tokens() const { return tokens_; }

 private:
  void take(const PrefixIndex::Found& found, std::int32_t tokens, ContextBlocks& context,
            BlockPools& pools);

  PrefixIndex index_;
  // Digests of beginnings that requests of this iteration are about to store. Two beginnings with the same digest
  // cost an iteration's wait and nothing else.
  std::unordered_set<std::uint64_t> coming_;
  std::int64_t tokens_ = 0;
};

}  // namespace poise
