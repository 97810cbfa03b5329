#pragma once
// Chooses which requests run in the next iteration, and how many of their tokens. Continuous batching,
// first come first served: requests of any length run together; when one finishes, the next waiting one
// takes its place at once. A prompt runs in chunks: at most `prefill_rows` prompt tokens in an iteration
// beside one token of each generating request, and at most `prompt_rows` once an eighth of the requests that may be
// under way generate. So requests that begin together do not all end together, and later prompts run while others'
// answers use the link.
//
// An order has one size at most. Edits of logits grow with what requests wish for, and the ids of tokens whose rows
// requests took over with how much they share. A request whose edits find no room in an iteration waits until older ones
// have ended; one whose ids find none waits for a later iteration.
//
// If a request finds no free block, the youngest of all gives its blocks back, then the next youngest, until
// there is one. No request takes blocks from an older one: the youngest, if it finds none, keeps those it
// has and waits. So the oldest request always advances, and every request ends. A request that gave its
// blocks back is recomputed later: prompt and answer so far run as one prompt, and the next token is
// sampled with the same seed and step.
//
// Where every layer has a window, blocks that no later row sees are dropped when an iteration is done: a request
// keeps its window, and its prompt runs in parts of about a window. If blocks that a row has to see are gone (rows of
// a lost device would run again, before dropped ones' end), the request runs again from its beginning.
//
// Requests whose prompts begin alike share blocks, and may wait an iteration for them (prefix_sharing.h). Where a
// lost device takes shared blocks with it, the oldest of their requests stores them again; the others begin anew.
//
// Prompts are attended on the device, whatever the policy says: they are much computation for few bytes.
// Host cores attend the single rows of a request that the policy gives to them (attended_on_host), while
// all of its blocks are KV blocks of the host.
//
// A function of the calls made, without clock, socket or log; one thread. Requests outlive the scheduler.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "planner/policies/policy.h"
#include "planner/requests/request.h"
#include "planner/schedule/block_table.h"
#include "planner/schedule/kept_context.h"
#include "planner/schedule/prefix_sharing.h"

namespace poise {

struct ScheduleLimits {
  std::int32_t max_num_seqs = 0;   // requests under way
  std::int32_t prefill_rows = 0;   // rows of prompts in an iteration
  std::int32_t prompt_rows = INT32_MAX;  // … of them beside requests that generate
  std::int32_t sequence_rows = 0;  // rows of one request in an iteration, those that run again
                                   // included: it lies in one mini-batch
  KeptContext kept = {};           // of requests without token blocks
  std::int64_t edits = 1 << 21;    // of logits in an iteration: half of the longest message
  // Ids of tokens whose rows are others', in an iteration: a quarter of the longest message.
  std::int64_t taken_over = 1 << 22;
  bool share_prefixes =
      false;  // REQUIRES, if set: no layer has a window, and rows do not depend on what follows
};

// A request that has begun: its text so far and where its context lies.
struct RunningRequest {
  RunningRequest(const Request& r, const Policy& policy)
      : request(&r),
        most_blocks(blocks_for(r.most_context())),
        token_blocks(policy.token_blocks(most_blocks)) {}

  const Request* request;
  std::vector<TokenId> answer;  // the tokens sampled so far: kept here alone
  ContextBlocks context;
  PrefixChain prefix;
  std::int32_t most_blocks;   // that it may have at most
  std::int32_t token_blocks;  // the first of them, which are kept only as token ids
  std::int32_t prompt_values =
      0;  // prompt rows whose values were reported; they survive preemption

  // Tokens of its text: the prompt, then the answer so far.
  std::int32_t known() const { return prompt_size() + answered(); }
  TokenId token(std::int32_t position) const {
    return position < prompt_size() ? request->prompt[static_cast<std::size_t>(position)]
                                    : answer[static_cast<std::size_t>(position - prompt_size())];
  }
  std::int32_t prompt_size() const { return static_cast<std::int32_t>(request->prompt.size()); }
  std::int32_t answered() const { return static_cast<std::int32_t>(answer.size()); }
  // Blocks of the pools that it has once it has come to `blocks` blocks, between two iterations.
  std::int32_t of_pools(std::int32_t blocks, const KeptContext& kept) const {
    return token_blocks > 0 ? std::max(0, blocks - token_blocks) : kept.between(blocks);
  }
  // … at its full length.
  std::int32_t most_of_pools(const KeptContext& kept) const { return of_pools(most_blocks, kept); }
};

// What one request runs in an iteration. Its blocks have room for context + new_tokens.
struct ScheduledChunk {
  const RunningRequest* request;
  std::int32_t context;     // tokens in blocks when the iteration begins
  std::int32_t new_tokens;  // rows: tokens context .. context + new_tokens - 1
  std::int32_t recompute_rows =
      0;  // more rows: tokens 0 .. recompute_rows - 1, whose keys and values are kept nowhere
  bool on_host = false;  // host cores attend it, where its blocks lie
  // Tokens from here to `context` were taken over from other requests: no order has named them as this one's.
  std::int32_t taken_over_from = 0;
  // Rows of tokens before this one stand behind a part of another's block, and are stored nowhere.
  std::int32_t stored_from = 0;

  // Those of its request that its rows read or are stored in, from the first on.
  std::int32_t blocks() const { return blocks_for(context + new_tokens); }
  // The request's whole text so far will have run; its next token may be sampled.
  bool complete() const { return context + new_tokens == request->known(); }
  bool generates() const { return complete() && request->request->sampling.max_tokens > 0; }
};

// The result of an iteration for a request that was `complete`; or the early end of a request that
// failed.
struct Outcome {
  RequestId request;
  std::optional<TokenId> token;  // its next token; nothing: the request is finished
};

// Blocks of the pools that requests need.
struct BlockNeed {
  std::int64_t most = 0;    // at their full lengths
  std::int64_t known = 0;   // at their present lengths, and one more each
  std::int64_t beside = 0;  // while parts of their prompts run

  BlockNeed& operator+=(const BlockNeed& more);
};

// What makes an iteration's order longer than its rows do.
struct OrderGrowth {
  std::int64_t edits = 0;       // of logits, at most
  std::int64_t taken_over = 0;  // ids of tokens whose rows are others'
};

class Scheduler {
 public:
  // `policy` outlives this.
  Scheduler(const Policy& policy, const Allocation& host, const ScheduleLimits& limits);

  // Adds it to the end of the queue. REQUIRES: it fits into the pool alone.
  void add(const Request& request);

  // The chunks of the next iteration, oldest request first; empty when no request is left. Valid
  // until the next call. With `only`, other requests have no chunk but keep their blocks and places; it
  // is empty if none of `only` can run beside them. REQUIRES: the chunks before were completed.
  std::span<const ScheduledChunk> next(std::span<const RequestId> only = {});
  // The iteration ran: its rows are stored. One outcome for each chunk that was complete, in any
  // order.
  void complete(std::span<const Outcome> outcomes);

  // What follows changes only the iterations to come. REQUIRES: no chunks are under way.
  // Another policy and its wished split. The host's pools and all blocks stay as they are, with one
  // exception: if a request has tokens that are not kept and this policy would keep them, the request
  // runs again from its beginning. `policy` outlives this. REQUIRES: if blocks on the device are taken,
  // `wished` has as many of them as before.
  void use(const Policy& policy, const Allocation& wished, const ScheduleLimits& limits);
  // Sets the sizes of the host's pools. REQUIRES: no block beyond them is taken, and together the pools
  // hold the largest request.
  void move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks);

  // Takes this request out, if it is here, and frees its blocks.
  void remove(RequestId request);

  // The iteration under way has no result: its rows count as not run, and `next` plans them again.
  // `device_lost`: the same holds for the rows of all blocks on the device; a request's blocks on the
  // host stay valid, before and after those.
  void abandon(bool device_lost);

  // What another scheduler needs to continue from this one: the requests that have begun, oldest
  // first; those without blocks wait. REQUIRES: no chunks are under way.
  struct Snapshot {
    RequestId request;
    std::vector<TokenId> answer;
    std::int32_t prompt_values = 0;
    bool running = false;
    std::int32_t stored = 0;  // lost rows among them included
    std::int32_t token_blocks = 0;
    std::vector<BlockRef> blocks;
    std::vector<std::uint32_t> lost;  // blocks that lost their rows, by their place in `blocks`
  };
  std::vector<Snapshot> snapshots() const;
  // REQUIRES: called before `add`, in the order of snapshots(). False if it is inconsistent: a block that
  // is taken or does not exist, more rows than blocks or text. If fewer may run at a time than before,
  // the last ones wait, and their context is computed again.
  bool restore(const Request& request, const Snapshot& begun);

  // Whether no iteration follows the one under way, for any result of it.
  bool last_iteration() const;
  bool idle() const { return running_.empty() && waiting() == 0; }
  std::int64_t running() const { return static_cast<std::int64_t>(running_.size()); }
  std::int64_t waiting() const {
    return static_cast<std::int64_t>(resumed_.size() + fresh_.size());
  }
  std::int64_t preemptions() const { return preemptions_; }
  // Tokens of prompts that were not computed, since another request's blocks hold them.
  std::int64_t shared_tokens() const { return prefixes_.tokens(); }
  const BlockPools& blocks() const { return blocks_; }

 private:
  // Starts the oldest waiting request, if the limits and free blocks allow it.
  bool admit();
  // Schedules request `index` for as many of its tokens as budget and blocks allow; false if it must
  // wait for blocks.
  bool schedule(std::size_t index);
  void make_room(std::size_t index, std::int32_t tokens);
  std::optional<BlockRef> take_block(const RunningRequest& request);
  void preempt_youngest();
  void give_back(RunningRequest& request);
  // Host cores read no block of two requests, so what they attend shares nothing.
  bool shares_prefix(const RunningRequest& request) const {
    return limits_.share_prefixes && request.token_blocks == 0 &&
           !attended_on_host(host_, request.request->id);
  }
  // Takes over what is there of its prompt's beginning; false if it waits for what an older one is about to store.
  bool share_prefix(RunningRequest& request);
  // Drops the blocks that no row of the request sees from now on.
  void drop_unseen(RunningRequest& request);
  void lose_device();
  bool take_again(RunningRequest& request, const Snapshot& begun);
  // Gives all blocks back if the rows to run next see one that was dropped.
  void begin_again_if_needed(RunningRequest& request);

  const Policy* policy_;
  Allocation host_;
  ScheduleLimits limits_;
  BlockPools blocks_;
  PrefixSharing prefixes_;
  std::vector<std::unique_ptr<RunningRequest>> running_;  // oldest first; older than all that wait
  std::deque<std::unique_ptr<RunningRequest>>
      resumed_;  // gave their blocks back; older than `fresh_`
  std::deque<const Request*> fresh_;
  std::vector<ScheduledChunk> chunks_;
  std::int32_t prefill_left_ = 0;  // of this iteration
  OrderGrowth order_;              // … so far
  BlockNeed need_;                 // of all running requests
  std::int64_t preemptions_ = 0;
};

// An iteration's outcomes in virtual time: some token for each complete chunk, and the end after the
// request's last one.
std::vector<Outcome> any_outcomes(std::span<const ScheduledChunk> chunks);

}  // namespace poise
