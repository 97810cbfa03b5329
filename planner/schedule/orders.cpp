#include "planner/schedule/orders.h"

#include <algorithm>
#include <bit>
#include <memory>

#include "common/trouble.h"
#include "planner/schedule/logit_edits.h"

namespace poise {
namespace {

messages::Kind wire(BlockKind kind) {
  return kind == BlockKind::kv ? messages::Kind::Kv : messages::Kind::Act;
}
messages::Place wire(Place place) {
  static_assert(static_cast<int>(messages::Place::Gpu) == static_cast<int>(Place::gpu) &&
                static_cast<int>(messages::Place::Nowhere) == static_cast<int>(Place::nowhere) &&
                static_cast<int>(messages::Place::Dropped) == static_cast<int>(Place::dropped));
  return static_cast<messages::Place>(place);
}
std::size_t index(BlockKind kind) { return static_cast<std::size_t>(kind); }
std::uint32_t unsigned_of(std::int64_t n) { return static_cast<std::uint32_t>(n); }
template <typename Record>
std::uint32_t count_of(const std::vector<Record>& records) {
  return static_cast<std::uint32_t>(records.size());
}

}  // namespace

// One mini-batch's tables while its sequences are added one by one.
class MiniBatchBuilder {
 public:
  MiniBatchBuilder(std::uint32_t id, std::span<const PackItem> items, const MiniBatchItems& batch,
                   OrderTables::Loaded& loaded, std::int32_t window, bool absorption)
      : loaded_(loaded), window_(window), absorption_(absorption) {
    tables_ = std::make_unique<messages::MiniBatchT>();
    tables_->id = id;
    std::int64_t entries = 0, rows = 0, sequences = 0;
    for (const std::int32_t i : batch) {
      const PackItem& item = items[static_cast<std::size_t>(i)];
      next_new_slot_[index(BlockKind::act)] += unsigned_of(item.act_loads);
      next_new_slot_[index(BlockKind::kv)] += unsigned_of(item.kv_loads);
      next_slot_here_ += unsigned_of(item.kv_slots);
      entries += item.act_slots + item.kv_slots + item.kv_here;
      rows += item.rows;
      sequences += item.sequences;
    }
    tables_->entries.reserve(static_cast<std::size_t>(entries));
    tables_->tokens.reserve(static_cast<std::size_t>(rows));
    tables_->sequences.reserve(static_cast<std::size_t>(sequences));
    tables_->prompt_tokens.reserve(static_cast<std::size_t>(sequences));
  }

  void add(const ScheduledChunk& chunk) {
    check(chunk.new_tokens > 0 && chunk.request->context.size() >= chunk.blocks(),
          "a chunk's blocks are those its rows need");
    const auto first_entry = count_of(tables_->entries);
    // Rows that run again make the keys and values of the first entries, which the others share.
    if (chunk.recompute_rows > 0) {
      add_rows(chunk, 0, chunk.recompute_rows, first_entry);
    }
    const std::uint32_t sequence = count_of(tables_->sequences);
    const std::uint32_t first_row = add_rows(chunk, chunk.context, chunk.new_tokens, first_entry);
    add_taken_over(chunk, sequence);
    add_entries(chunk);
    add_stores(chunk, first_row);
    add_sample(chunk, sequence);
  }

  std::unique_ptr<messages::MiniBatchT> finish() {
    // ACT first: regeneration works on them while the KV blocks arrive.
    const std::uint32_t seen = add_acts(loaded_.seen, 0);
    const std::uint32_t all = add_acts(loaded_.unseen, seen);
    for (const auto& [first, end] : {std::pair{0U, seen}, {seen, all}}) {
      if (end > first) {
        tables_->regenerate.emplace_back(first, end - first);
      }
    }
    add_acts(loaded_.absorbed, all);
    std::uint32_t slot = 0;
    for (ByPool* loaded : {&loaded_.seen, &loaded_.unseen}) {
      slot = add_loads((*loaded)[pool_index(BlockKind::kv, Place::host)], slot);
      next_slot_here_ =
          add_loads((*loaded)[pool_index(BlockKind::kv, Place::gpu)], next_slot_here_);
    }
    for (const auto& [entry, tokens] : parts_) {
      const messages::AttentionEntry& at = tables_->entries[entry];
      tables_->entries[entry] =
          messages::AttentionEntry(at.where(), at.kind(), at.place(), 0, slot, at.block());
      tables_->loads.emplace_back(at.kind(), at.place(), static_cast<std::uint16_t>(tokens), 1,
                                  at.block(), slot++);
    }
    return std::move(tables_);
  }

 private:
  // A sequence of the part's request: its tokens from `context` on. Returns its first row.
  std::uint32_t add_rows(const ScheduledChunk& chunk, std::int32_t context, std::int32_t tokens,
                         std::uint32_t first_entry) {
    const std::uint32_t first_row = count_of(tables_->tokens);
    tables_->sequences.emplace_back(chunk.request->request->id.n, unsigned_of(context),
                                    unsigned_of(tokens), first_row, first_entry);
    tables_->prompt_tokens.push_back(unsigned_of(chunk.request->prompt_size()));
    for (std::int32_t position = context; position < context + tokens; ++position) {
      tables_->tokens.push_back(chunk.request->token(position));
    }
    return first_row;
  }

  // A single row behind the prompt: the schedule alone says so, never what a machine has done by then.
  static bool is_of_answer(const ScheduledChunk& chunk) {
    return chunk.new_tokens == 1 && chunk.context >= chunk.request->prompt_size();
  }

  // The ids of tokens that the request never runs: another's blocks hold their rows.
  void add_taken_over(const ScheduledChunk& chunk, std::uint32_t sequence) {
    const bool part = chunk.stored_from > chunk.context;
    const std::int32_t most = std::min(chunk.context, chunk.request->prompt_size());
    const std::int32_t end = part ? most : most / kBlockTokens * kBlockTokens;
    if (chunk.taken_over_from >= end) {
      return;
    }
    auto taken = std::make_unique<messages::TakenOverT>();
    taken->sequence = sequence;
    taken->position = unsigned_of(chunk.taken_over_from);
    for (std::int32_t position = chunk.taken_over_from; position < end; ++position) {
      taken->tokens.push_back(chunk.request->token(position));
    }
    tables_->taken_over.push_back(std::move(taken));
  }

  void add_entries(const ScheduledChunk& chunk) {
    const auto& blocks = chunk.request->context.blocks();
    const std::int32_t loaded = blocks_for(chunk.context);
    const std::int32_t unseen = unseen_blocks(chunk.context, window_);
    if (chunk.on_host) {
      for (std::int32_t i = 0; i < chunk.blocks(); ++i) {
        const BlockRef& block = blocks[static_cast<std::size_t>(i)];
        tables_->entries.emplace_back(messages::Where::HostInPlace, wire(block.kind),
                                      wire(block.place), 0, 0, block.number.n);
      }
      return;
    }
    const bool absorbs = absorption_ && is_of_answer(chunk);
    for (std::int32_t i = 0; i < chunk.blocks(); ++i) {
      const BlockRef& block = blocks[static_cast<std::size_t>(i)];
      const bool absorbed = absorbs && block.kind == BlockKind::act;
      std::uint32_t slot = 0;               // of a loaded block: once all are known
      if (block.place == Place::dropped) {  // it has none
        check(i < unseen, "a block that was dropped is not seen");
      } else if (i + 1 == loaded && chunk.stored_from > chunk.context) {
        check(block.kind == BlockKind::kv && block.place == Place::host,
              "parts of KV blocks of the host are taken over");
        parts_.emplace_back(count_of(tables_->entries), unsigned_of(chunk.context % kBlockTokens));
      } else if (i < loaded && block.place != Place::nowhere) {
        ByPool& loaded_to = absorbed     ? loaded_.absorbed
                            : i < unseen ? loaded_.unseen
                                         : loaded_.seen;
        loaded_to[pool_index(block.kind, block.place)].add(
            block.number, count_of(tables_->entries),
            std::min(chunk.context - i * kBlockTokens, kBlockTokens));
      } else {
        slot = block.kind == BlockKind::kv && block.place == Place::gpu
                   ? next_slot_here_++
                   : next_new_slot_[index(block.kind)]++;
      }
      tables_->entries.emplace_back(block.kind == BlockKind::kv ? messages::Where::LoadedKv
                                    : absorbed                  ? messages::Where::Activation
                                                                : messages::Where::RegeneratedKv,
                                    wire(block.kind), wire(block.place), 0, slot, block.number.n);
    }
  }

  using ByPool = std::array<OrderTables::LoadedBlocks, kPools>;

  std::uint32_t add_acts(ByPool& loaded, std::uint32_t slot) {
    const std::uint32_t of_host = add_loads(loaded[pool_index(BlockKind::act, Place::host)], slot);
    return add_loads(loaded[pool_index(BlockKind::act, Place::gpu)], of_host);
  }

  // Gives the loaded blocks of a pool the slots from `slot` on, and joins neighbours into runs; a
  // block that is not full ends its run. Returns the next slot.
  std::uint32_t add_loads(OrderTables::LoadedBlocks& loaded, std::uint32_t slot) {
    auto& runs = tables_->loads;
    bool open = false;  // the last run may go on
    loaded.take_all([&](std::uint32_t block, std::uint32_t entry, std::uint32_t tokens) {
      const messages::AttentionEntry& at = tables_->entries[entry];
      tables_->entries[entry] =
          messages::AttentionEntry(at.where(), at.kind(), at.place(), 0, slot, at.block());
      const auto tail = static_cast<std::uint16_t>(tokens);
      if (open && runs.back().first_block() + runs.back().count() == block) {
        const messages::BlockRun& last = runs.back();
        runs.back() = messages::BlockRun(last.kind(), last.place(), tail, last.count() + 1,
                                         last.first_block(), last.first_slot());
      } else {
        runs.emplace_back(at.kind(), at.place(), tail, 1, block, slot);
      }
      open = tokens == static_cast<std::uint32_t>(kBlockTokens);
      ++slot;
    });
    loaded.take_repeated([&](std::uint32_t entry, std::uint32_t first) {
      tables_->entries[entry] = tables_->entries[first];
    });
    return slot;
  }

  void add_stores(const ScheduledChunk& chunk, std::uint32_t first_row) {
    const auto& blocks = chunk.request->context.blocks();
    const std::int32_t end = chunk.context + chunk.new_tokens;
    for (std::int32_t position = chunk.context; position < end;) {
      const BlockRef& block = blocks[static_cast<std::size_t>(position / kBlockTokens)];
      const std::int32_t token = position % kBlockTokens;
      const std::int32_t count = std::min(kBlockTokens - token, end - position);
      if (block.place != Place::nowhere && position >= chunk.stored_from) {
        tables_->stores.emplace_back(
            wire(block.kind), wire(block.place), static_cast<std::uint16_t>(token),
            unsigned_of(count), first_row + unsigned_of(position - chunk.context), block.number.n);
      }
      position += count;
    }
  }

  void add_sample(const ScheduledChunk& chunk, std::uint32_t sequence) {
    const SamplingParams& sampling = chunk.request->request->sampling;
    auto targets = prompt_targets(chunk);
    if (!chunk.generates() && targets.empty()) {
      return;
    }
    auto sample = std::make_unique<messages::SampleT>();
    sample->sequence = sequence;
    sample->generate = chunk.generates();
    sample->temperature = sampling.temperature;
    sample->top_p = sampling.top_p;
    sample->top_k = sampling.top_k;
    sample->seed = sampling.seed;
    sample->step = static_cast<std::uint64_t>(chunk.request->answered());
    sample->logprobs = sampling.logprobs;
    sample->prompt_logprobs = !targets.empty();
    sample->prompt_targets = std::move(targets);
    sample->prompt_top = sampling.prompt_top;
    sample->min_p = sampling.min_p;
    if (chunk.generates() && sampling.wishes) {
      sample->mask = sampling.wishes->allowed;
      sample->edits = logit_edits(sampling, chunk.request->answer);
    }
    tables_->samples.push_back(std::move(sample));
  }

  // The prompt token after each row, for rows whose values were not reported before; empty where no
  // row has one.
  static std::vector<TokenId> prompt_targets(const ScheduledChunk& chunk) {
    const Request& request = *chunk.request->request;
    if (!request.sampling.prompt_logprobs()) {
      return {};
    }
    const std::int32_t first = std::max({chunk.context, chunk.request->prompt_values,
                                         static_cast<std::int32_t>(request.first_valued()) - 1});
    const std::int32_t end = std::min(chunk.context + chunk.new_tokens,
                                      static_cast<std::int32_t>(request.given_tokens()) - 1);
    if (first >= end) {
      return {};
    }
    std::vector<TokenId> targets(static_cast<std::size_t>(chunk.new_tokens), -1);
    for (std::int32_t position = first; position < end; ++position) {
      targets[static_cast<std::size_t>(position - chunk.context)] =
          request.token_or_scored(static_cast<std::size_t>(position) + 1);
    }
    return targets;
  }

  OrderTables::Loaded& loaded_;
  const std::int32_t window_;
  const bool absorption_;
  std::unique_ptr<messages::MiniBatchT> tables_;
  std::array<std::uint32_t, 2> next_new_slot_{};  // behind all loaded blocks of the mini-batch
  std::uint32_t next_slot_here_ = 0;              // of KV blocks of the device, behind all others
  std::vector<std::pair<std::uint32_t, std::uint32_t>> parts_;  // of blocks: entry, tokens
};

OrderTables::LoadedBlocks::LoadedBlocks(std::uint32_t blocks)
    : bits_(static_cast<std::size_t>(ceil_div(blocks, 64))), uses_(blocks) {}

void OrderTables::LoadedBlocks::add(BlockId block, std::uint32_t entry, std::int32_t tokens) {
  std::uint64_t& word = bits_.at(block.n / 64);
  if ((word >> (block.n % 64) & 1) != 0) {
    check(tokens == kBlockTokens && uses_[block.n].tokens == unsigned_of(tokens),
          "only full blocks are shared");
    repeated_.emplace_back(entry, block.n);
    return;
  }
  if (word == 0) {
    words_.push_back(block.n / 64);
  }
  word |= std::uint64_t{1} << (block.n % 64);
  uses_[block.n] = {.entry = entry, .tokens = unsigned_of(tokens)};
}

template <typename Take>
void OrderTables::LoadedBlocks::take_all(const Take& take) {
  std::ranges::sort(words_);
  for (const std::uint32_t word : words_) {
    for (std::uint64_t left = std::exchange(bits_[word], 0); left != 0; left &= left - 1) {
      const std::uint32_t block = 64 * word + static_cast<std::uint32_t>(std::countr_zero(left));
      take(block, uses_[block].entry, uses_[block].tokens);
    }
  }
  words_.clear();
}

template <typename Take>
void OrderTables::LoadedBlocks::take_repeated(const Take& take) {
  for (const auto& [entry, block] : repeated_) {
    take(entry, uses_[block].entry);
  }
  repeated_.clear();
}

OrderTables::OrderTables(const Allocation& host, const LayerWindows& windows, bool absorption)
    : loaded_{.seen = pools_of(host),
              .unseen = pools_of(windows.empty() ? Allocation() : host),
              .absorbed = pools_of(absorption ? host : Allocation())},
      window_(window_of(windows)),
      absorption_(absorption) {}

std::array<OrderTables::LoadedBlocks, kPools> OrderTables::pools_of(const Allocation& host) {
  return {LoadedBlocks(host.kv_blocks), LoadedBlocks(host.act_blocks),
          LoadedBlocks(host.gpu_kv_blocks), LoadedBlocks(host.gpu_act_blocks)};
}

std::vector<PackItem> pack_items(std::span<const ScheduledChunk> chunks) {
  std::vector<PackItem> items;
  items.reserve(chunks.size());
  for (const ScheduledChunk& chunk : chunks) {
    const ContextBlocks& context = chunk.request->context;
    PackItem item{.act_slots = context.count(BlockKind::act),
                  .kv_slots = context.count(BlockKind::kv, Place::host) + context.token_blocks(),
                  .kv_here = context.count(BlockKind::kv, Place::gpu),
                  .act_loads = context.count(BlockKind::act),
                  .kv_loads = context.count(BlockKind::kv, Place::host),
                  .rows = chunk.new_tokens + chunk.recompute_rows,
                  .sequences = chunk.recompute_rows > 0 ? 2 : 1};
    if (chunk.on_host) {
      items.push_back({.rows = chunk.new_tokens, .on_host = true});
      continue;
    }
    for (std::int32_t i = blocks_for(chunk.context); i < context.size(); ++i) {
      const BlockRef& block = context.blocks()[static_cast<std::size_t>(i)];
      const bool is_act = block.kind == BlockKind::act;
      const bool here = !is_act && block.place == Place::gpu;
      if (block.place != Place::nowhere && !here) {
        --(is_act ? item.act_loads : item.kv_loads);
      }
      if (i >= chunk.blocks()) {  // behind its rows
        --(is_act ? item.act_slots : here ? item.kv_here : item.kv_slots);
      }
    }
    items.push_back(item);
  }
  return items;
}

messages::IterationT OrderTables::build(std::uint64_t iteration, std::uint64_t pool_epoch,
                                        std::span<const ScheduledChunk> chunks,
                                        std::span<const PackItem> items,
                                        std::span<const MiniBatchItems> batches) {
  messages::IterationT tables;
  tables.iteration = iteration;
  tables.pool_epoch = pool_epoch;
  for (const MiniBatchItems& batch : batches) {
    MiniBatchBuilder builder(unsigned_of(static_cast<std::int64_t>(tables.mini_batches.size())),
                             items, batch, loaded_, window_, absorption_);
    for (const std::int32_t i : batch) {
      builder.add(chunks[static_cast<std::size_t>(i)]);
    }
    tables.mini_batches.push_back(builder.finish());
  }
  return tables;
}

}  // namespace poise
