#pragma once
// A planner for tests: cuts sequences whose tokens are all known beforehand into parts, mini-batches
// and iterations, gives them blocks and slots, and writes the orders. Because nothing waits for a
// sampled token, every order of a run can be queued before the first is done.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "common/blocks.h"
#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "common/weight_layout.h"
#include "common/windows/unseen_blocks.h"
#include "tests/gpu_executor/tiny_model.h"

namespace poise::test {

struct Plan {
  std::vector<std::vector<std::int32_t>> sequences;  // tokens, by request
  std::function<BlockKind(std::uint32_t request, std::uint32_t block)> kind;
  // First blocks of each request that are kept nowhere: made again by rows of their own.
  std::uint32_t nowhere = 0;
  // Of all layers: blocks that it leaves unseen are given back between two iterations. 0: none are.
  std::int32_t window = 0;
  std::int32_t prompt = 20;         // tokens of each sequence that are a prompt …
  std::int32_t chunk = 1000;        // … run in chunks of this many; the rest one by one
  std::int32_t chunks_at_once = 1;  // chunks of one prompt in one iteration, each its own batch
  std::int32_t per_batch = 2;       // sequences in a mini-batch
  std::int32_t logprobs = 3;
  bool edits = false;         // of the logits behind each sequence: three of them
  bool late_weights = false;  // all but the first piece arrive while their layer computes
  bool reversed = false;      // mini-batches computed from the last to the first
  // Requests whose blocks are KV blocks of the host, and which host cores attend there: with every part, or
  // with those of one row alone, in turn.
  std::function<bool(std::uint32_t request)> on_host = nullptr;
  // ACT blocks that single rows behind the prompt attend as they are.
  std::function<bool(std::uint32_t request, std::uint32_t block)> absorbed = nullptr;
  std::uint32_t seed = 1;  // of slots' and blocks' numbers; 0: in order
};

struct Part {
  std::uint32_t request;
  std::uint32_t context, count;
};

// One iteration as messages: its tables and one order a stage.
struct Planned {
  messages::IterationT tables;
  std::vector<messages::LayerOrderT> orders;
};

class SmallPlanner {
 public:
  SmallPlanner(const Plan& plan, const WeightLayout& layout, const DeviceLimits& limits,
               const PoolPartition& pool)
      : plan_(plan), layout_(layout), limits_(limits), random_(plan.seed) {
    for (const BlockKind kind : {BlockKind::kv, BlockKind::act}) {
      auto& free = free_[static_cast<std::size_t>(kind)];
      free.resize(pool.blocks(kind));
      std::iota(free.rbegin(), free.rend(), 0u);
      shuffle(free);
    }
    for (const BlockKind kind : {BlockKind::kv, BlockKind::act}) {
      auto& free = free_here_[static_cast<std::size_t>(kind)];
      free.resize(static_cast<std::size_t>(kind == BlockKind::kv ? limits.gpu_kv_blocks
                                                                 : limits.gpu_act_blocks));
      std::iota(free.rbegin(), free.rend(), 0u);
      shuffle(free);
    }
    context_.resize(plan.sequences.size());
    blocks_.resize(plan.sequences.size());
  }

  // Nothing more to do: an iteration without mini-batches.
  Planned next() {
    Planned planned;
    planned.tables.iteration = ++iteration_;
    planned.tables.pool_epoch = 1;
    for (std::uint32_t request = 0; request < blocks_.size(); ++request) {
      drop(blocks_[request],
           static_cast<std::size_t>(unseen_blocks(context_[request], plan_.window)));
    }
    for (const std::vector<Part>& batch : cut()) {
      planned.tables.mini_batches.push_back(
          tables(batch, static_cast<std::uint32_t>(planned.tables.mini_batches.size())));
    }
    if (!planned.tables.mini_batches.empty()) {
      for (std::int32_t stage = 0; stage <= layout_.layers + 1; ++stage) {
        planned.orders.push_back(order(static_cast<std::uint32_t>(stage), planned.tables));
      }
    }
    return planned;
  }

 private:
  struct Block {
    BlockKind kind;
    messages::Place place;
    std::uint32_t number;
  };

  // Blocks lie on the device in turn with the host, as long as it has some.
  Block take_block(std::uint32_t request, std::uint32_t j) {
    if (j < plan_.nowhere) {
      return {BlockKind::kv, messages::Place::Nowhere, 0};
    }
    if (of_host(request)) {
      return {BlockKind::kv, messages::Place::Host, take(free_[0])};
    }
    const BlockKind kind = plan_.kind(request, j);
    auto& free_here = free_here_[static_cast<std::size_t>(kind)];
    const bool here = (request + j) % 2 == 0 && !free_here.empty();
    return {kind, here ? messages::Place::Gpu : messages::Place::Host,
            take(here ? free_here : free_[static_cast<std::size_t>(kind)])};
  }

  void drop(std::vector<Block>& blocks, std::size_t unseen) {
    for (std::size_t j = 0; j < unseen; ++j) {
      if (blocks[j].place != messages::Place::Dropped) {
        auto& free = blocks[j].place == messages::Place::Gpu ? free_here_ : free_;
        free[static_cast<std::size_t>(blocks[j].kind)].push_back(blocks[j].number);
        blocks[j] = {BlockKind::kv, messages::Place::Dropped, 0};
      }
    }
  }

  bool of_host(std::uint32_t request) const { return plan_.on_host && plan_.on_host(request); }
  bool absorbs(const Part& part, std::uint32_t block) const {
    return plan_.absorbed && part.count == 1 &&
           part.context >= static_cast<std::uint32_t>(plan_.prompt) &&
           plan_.absorbed(part.request, block);
  }
  bool attended_on_host(const Part& part) const {
    return of_host(part.request) && (part.count == 1 || part.request % 2 == 0);
  }

  void shuffle(std::vector<std::uint32_t>& numbers) {
    if (plan_.seed != 0) {
      std::ranges::shuffle(numbers, random_);
    }
  }

  std::vector<std::vector<Part>> cut() {
    std::vector<std::vector<Part>> batches, of_host;
    std::vector<std::uint32_t> planned = context_;
    for (std::int32_t round = 0; round < plan_.chunks_at_once; ++round) {
      std::vector<Part> parts;
      for (std::uint32_t request = 0; request < plan_.sequences.size(); ++request) {
        const auto all = static_cast<std::uint32_t>(plan_.sequences[request].size());
        const std::uint32_t prompt = std::min(all, static_cast<std::uint32_t>(plan_.prompt));
        const std::uint32_t done = planned[request];
        const bool in_prompt = done < prompt;
        if (done == all || (round > 0 && !in_prompt)) {
          continue;
        }
        const std::uint32_t count =
            in_prompt ? std::min(prompt - done, static_cast<std::uint32_t>(plan_.chunk)) : 1;
        parts.push_back({request, done, count});
        planned[request] += count;
      }
      const auto add = [&](std::vector<std::vector<Part>>& to, bool on_host) {
        std::int32_t added = 0;
        for (const Part& part : parts) {
          if (attended_on_host(part) == on_host) {
            if (added++ % plan_.per_batch == 0) {
              to.emplace_back();
            }
            to.back().push_back(part);
          }
        }
      };
      add(batches, false);
      add(of_host, true);
    }
    batches.insert(batches.end(), of_host.begin(), of_host.end());
    context_ = planned;
    return batches;
  }

  std::vector<std::uint32_t> slots(std::int32_t count, std::int32_t first = 0) {
    std::vector<std::uint32_t> numbers(static_cast<std::size_t>(count));
    std::iota(numbers.rbegin(), numbers.rend(), static_cast<std::uint32_t>(first));
    shuffle(numbers);
    return numbers;
  }

  static std::uint32_t take(std::vector<std::uint32_t>& free) {
    const std::uint32_t number = free.back();
    free.pop_back();
    return number;
  }

  std::unique_ptr<messages::MiniBatchT> tables(const std::vector<Part>& parts, std::uint32_t id) {
    auto batch = std::make_unique<messages::MiniBatchT>();
    batch->id = id;
    std::vector<std::uint32_t> kv_slots = slots(limits_.kv_slots);
    std::vector<std::uint32_t> act_slots = slots(limits_.act_slots);
    std::vector<std::uint32_t> slots_here = slots(limits_.gpu_kv_blocks, limits_.kv_slots);
    for (const Part& part : parts) {
      const auto& tokens = plan_.sequences[part.request];
      const auto prompt =
          static_cast<std::uint32_t>(std::min<std::ptrdiff_t>(plan_.prompt, std::ssize(tokens)));
      const std::uint32_t again =
          std::min(part.context, plan_.nowhere * static_cast<std::uint32_t>(kBlockTokens));
      if (again > 0) {  // through the entries that the sequence behind it has, too
        batch->sequences.emplace_back(part.request, 0, again,
                                      static_cast<std::uint32_t>(batch->tokens.size()),
                                      static_cast<std::uint32_t>(batch->entries.size()));
        batch->tokens.insert(batch->tokens.end(), tokens.begin(), tokens.begin() + again);
        batch->prompt_tokens.push_back(prompt);
      }
      const auto first_row = static_cast<std::uint32_t>(batch->tokens.size());
      const std::uint32_t end = part.context + part.count;
      batch->sequences.emplace_back(part.request, part.context, part.count, first_row,
                                    static_cast<std::uint32_t>(batch->entries.size()));
      batch->tokens.insert(batch->tokens.end(), tokens.begin() + part.context,
                           tokens.begin() + end);
      batch->prompt_tokens.push_back(prompt);
      add_blocks(part, *batch, kv_slots, act_slots, slots_here);
      auto sample = std::make_unique<messages::SampleT>();
      sample->sequence = static_cast<std::uint32_t>(batch->sequences.size()) - 1;
      sample->temperature = 0;
      sample->logprobs = plan_.logprobs;
      sample->prompt_logprobs = true;
      for (std::uint32_t at = part.context; at < end; ++at) {
        sample->prompt_targets.push_back(at + 1 < tokens.size() ? tokens[at + 1] : -1);
      }
      if (plan_.edits && sample->prompt_targets.back() < 0) {
        const auto request = static_cast<std::int32_t>(part.request);
        sample->edits = {{request, 50, 1, 0}, {request + 1, 0, 2, 1}, {request + 3, 50, 1, 0.5f}};
        sample->only_edited = request % 2 == 0;
        if (request % 3 == 1) {  // all but the best token
          sample->mask.assign(static_cast<std::size_t>(mask_words(tiny_shape().vocab_size)), 0);
          sample->mask[static_cast<std::size_t>(request + 3) / 32] |= std::uint32_t{1}
                                                                      << ((request + 3) % 32);
        }
      }
      batch->samples.push_back(std::move(sample));
    }
    return batch;
  }

  void add_blocks(const Part& part, messages::MiniBatchT& batch,
                  std::vector<std::uint32_t>& kv_slots, std::vector<std::uint32_t>& act_slots,
                  std::vector<std::uint32_t>& slots_here) {
    auto& blocks = blocks_[part.request];
    const std::uint32_t end = part.context + part.count;
    for (std::uint32_t j = 0; j * kBlockTokens < end; ++j) {
      if (j == blocks.size()) {
        blocks.push_back(take_block(part.request, j));
      }
      const Block& block = blocks[j];
      const bool kv = block.kind == BlockKind::kv;
      const bool here = kv && block.place == messages::Place::Gpu;
      const bool in_place = attended_on_host(part);
      const bool absorbed = !kv && absorbs(part, j);
      if (block.place == messages::Place::Dropped) {
        batch.entries.emplace_back(
            in_place ? messages::Where::HostInPlace : messages::Where::LoadedKv,
            messages::Kind::Kv, block.place, 0, 0, 0);
        continue;
      }
      const std::uint32_t slot =
          in_place ? 0 : take(here ? slots_here : kv ? kv_slots : act_slots);
      const auto kind = static_cast<messages::Kind>(block.kind);
      const std::uint32_t start = j * kBlockTokens;
      const std::uint32_t old_rows =
          std::min<std::uint32_t>(part.context - std::min(part.context, start), kBlockTokens);
      const bool kept = block.place != messages::Place::Nowhere;
      if (old_rows > 0 && kept && !in_place) {
        add_load(batch, block, slot, static_cast<std::uint16_t>(old_rows));
        if (!kv && !absorbed) {
          batch.regenerate.emplace_back(slot, 1);
        }
      }
      batch.entries.emplace_back(in_place   ? messages::Where::HostInPlace
                                 : kv       ? messages::Where::LoadedKv
                                 : absorbed ? messages::Where::Activation
                                            : messages::Where::RegeneratedKv,
                                 kind, block.place, 0, slot, block.number);
      const std::uint32_t until = std::min<std::uint32_t>(end - start, kBlockTokens);
      if (until > old_rows && kept) {
        batch.stores.emplace_back(
            kind, block.place, static_cast<std::uint16_t>(old_rows), until - old_rows,
            batch.sequences.back().first_row() + start + old_rows - part.context, block.number);
      }
    }
  }

  // Joins the run before, where blocks and slots are neighbours.
  static void add_load(messages::MiniBatchT& batch, const Block& block, std::uint32_t slot,
                       std::uint16_t tokens) {
    const auto kind = static_cast<messages::Kind>(block.kind);
    if (!batch.loads.empty()) {
      const messages::BlockRun last = batch.loads.back();
      if (last.kind() == kind && last.place() == block.place &&
          last.tail_tokens() == kBlockTokens && last.first_block() + last.count() == block.number &&
          last.first_slot() + last.count() == slot) {
        batch.loads.back() = messages::BlockRun(kind, block.place, tokens, last.count() + 1,
                                                last.first_block(), last.first_slot());
        return;
      }
    }
    batch.loads.emplace_back(kind, block.place, tokens, 1, block.number, slot);
  }

  // Each streamed layer is fetched while the streamed layer before it computes.
  messages::LayerOrderT order(std::uint32_t stage, const messages::IterationT& tables) {
    messages::LayerOrderT order;
    order.iteration = tables.iteration;
    order.stage = stage;
    for (std::uint32_t id = 0; id < tables.mini_batches.size(); ++id) {
      order.mini_batches.push_back(id);
    }
    if (plan_.reversed) {
      std::ranges::reverse(order.mini_batches);
    }
    std::vector<std::uint32_t> streamed;
    for (std::uint32_t layer = 0; layer < static_cast<std::uint32_t>(layout_.layers); ++layer) {
      if (!is_resident(limits_, {layer}, layout_.layers)) {
        streamed.push_back(layer);
      }
    }
    const auto here = std::ranges::find(streamed, stage - 1);
    const auto last = static_cast<std::uint32_t>(tables.mini_batches.size()) - 1;
    const auto pieces = static_cast<std::uint32_t>(layout_.layer.pieces.size());
    const std::uint32_t early = plan_.late_weights ? 1 : pieces;
    const bool first = tables.iteration == 1 && stage == 0;
    const bool streams = stage > 0 && here != streamed.end();
    if (streams) {
      for (std::uint32_t piece = early; piece < pieces; ++piece) {
        order.fetch.emplace_back(stage - 1, piece, order.mini_batches[0]);
      }
    }
    if (!streamed.empty() && (first || streams)) {
      const std::uint32_t next =
          first || here + 1 == streamed.end() ? streamed.front() : *(here + 1);
      for (std::uint32_t piece = 0; piece < early; ++piece) {
        order.fetch.emplace_back(next, piece, std::min(piece, last));
      }
    }
    return order;
  }

  const Plan& plan_;
  const WeightLayout& layout_;
  const DeviceLimits& limits_;
  std::mt19937 random_;
  std::vector<std::uint32_t> free_[2];       // blocks on the host, by kind
  std::vector<std::uint32_t> free_here_[2];  // on the device, by kind
  std::vector<std::uint32_t> context_;       // by request
  std::vector<std::vector<Block>> blocks_;
  std::uint64_t iteration_ = 0;
};

}  // namespace poise::test
