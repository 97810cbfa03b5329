#pragma once
// Runs orders on symbols instead of numbers: a row of a block is (request, position, token), or
// nothing if it was never written. It trusts no order and knows nothing of how orders are built: each
// rule is stated here from common/messages.fbs. The "model" is a hash of all tokens a sequence's
// attention reads, so an answer is right only if every row came from the right place; being a
// function of the text alone, it must not depend on policy, chunks, preemption or mini-batches. A row may be
// another request's only where the test has said that both prompts are the same up to there.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/messages_generated.h"
#include "planner/policies/policy.h"
#include "planner/requests/request.h"

namespace poise {

inline constexpr int kVocabulary = 1000;

// The next token of a text.
inline TokenId symbolic_token(const std::vector<TokenId>& text, std::uint64_t seed) {
  std::uint64_t hash = 0xcbf29ce484222325ull ^ seed;
  for (const TokenId token : text) {
    hash = (hash ^ static_cast<std::uint64_t>(token)) * 0x100000001b3ull;
  }
  return static_cast<TokenId>((hash >> 20) % kVocabulary);
}

struct SymbolicResult {
  std::optional<TokenId> token;
  std::vector<std::pair<std::uint32_t, TokenId>> prompt_targets;  // position, target
};

class SymbolicExecutor {
 public:
  // `window`: of all layers; 0: none. `absorption`: single rows may attend activations as they are.
  SymbolicExecutor(const Allocation& host, const PackLimits& limits, std::int32_t max_rows,
                   std::int32_t window = 0, bool absorption = false)
      : limits_(limits), max_rows_(max_rows), window_(window), absorption_(absorption) {
    pools_[kAct].resize(host.act_blocks);
    pools_[kKv].resize(host.kv_blocks);
    pools_[kHere + kAct].resize(host.gpu_act_blocks);
    pools_[kHere + kKv].resize(host.gpu_kv_blocks);
  }

  // From now on it may share rows with others whose prompts begin alike.
  void know(const Request& request) { prompts_[request.id.n] = request.prompt.get(); }

  // One decoder layer stands for all: tables are the same for each. By request id.
  std::map<std::uint32_t, SymbolicResult> run(const messages::IterationT& iteration) {
    std::map<std::pair<int, std::uint32_t>, bool> blocks;  // whether new rows go there
    std::set<std::uint32_t> requests;
    std::map<std::uint32_t, SymbolicResult> results;
    std::int64_t rows = 0;
    host_began_ = false;
    for (std::size_t i = 0; i < iteration.mini_batches.size(); ++i) {
      const messages::MiniBatchT& batch = *iteration.mini_batches[i];
      EXPECT_EQ(batch.id, i);
      rows += static_cast<std::int64_t>(batch.tokens.size());
      for (std::size_t j = 0; j < batch.sequences.size(); ++j) {
        const auto& sequence = batch.sequences[j];
        const std::uint32_t end = sequence.context() + sequence.new_tokens();
        for (std::uint32_t at = 0; at < end; at += kBlockTokens) {
          if (takes_part(batch, j, at / kBlockTokens)) {
            ++parts_;
            continue;
          }
          const auto& entry = batch.entries.at(sequence.first_entry() + at / kBlockTokens);
          if (entry.place() == messages::Place::Nowhere ||
              entry.place() == messages::Place::Dropped) {
            continue;
          }
          const bool written = at + kBlockTokens > sequence.context();
          const auto [before, fresh] =
              blocks.emplace(std::pair(pool_of(entry), entry.block()), written);
          EXPECT_TRUE(fresh || (!written && !before->second && !prompts_.empty()))
              << "two sequences share block " << entry.block();
          shared_blocks_ += fresh ? 0 : 1;
        }
      }
      for (std::size_t j = 0; j < batch.sequences.size(); ++j) {
        if (!runs_again(batch, j)) {
          EXPECT_TRUE(requests.insert(batch.sequences[j].request()).second)
              << "a request runs twice";
        }
      }
      run(batch, results);
    }
    EXPECT_LE(rows, max_rows_);
    return results;
  }

  // Another device, whose blocks were never written.
  void lose_device() {
    for (const int kind : {kKv, kAct}) {
      pools_[kHere + kind].assign(pools_[kHere + kind].size(), {});
    }
  }

  std::int64_t loaded_tokens() const { return loaded_tokens_; }
  std::int64_t load_runs() const { return load_runs_; }
  std::int64_t host_rows() const { return host_rows_; }          // that host cores attended
  std::int64_t absorbed_rows() const { return absorbed_rows_; }  // attended or made as activations
  std::int64_t shared_blocks() const { return shared_blocks_; }  // read by a second sequence
  std::int64_t parts() const { return parts_; }      // of blocks that sequences took over
  std::int64_t dropped() const { return dropped_; }  // blocks that sequences went without

 private:
  struct Row {
    std::uint32_t request = 0;
    std::uint32_t position = 0;
    TokenId token = -1;
    friend auto operator<=>(const Row&, const Row&) = default;
  };
  using Block = std::array<std::optional<Row>, kBlockTokens>;
  static constexpr int kKv = static_cast<int>(messages::Kind::Kv);
  static constexpr int kAct = static_cast<int>(messages::Kind::Act);
  static constexpr int kHere = 2;  // on the device

  template <typename Named>
  static int pool_of(const Named& named) {
    EXPECT_TRUE(named.place() == messages::Place::Host || named.place() == messages::Place::Gpu);
    return static_cast<int>(named.kind()) + (named.place() == messages::Place::Gpu ? kHere : 0);
  }

  // Whether a sequence's rows make what is kept nowhere again, for the next, of the same request.
  static bool runs_again(const messages::MiniBatchT& batch, std::size_t sequence) {
    return sequence + 1 < batch.sequences.size() &&
           batch.sequences[sequence + 1].request() == batch.sequences[sequence].request();
  }

  // Whether a sequence took over the first rows of its block from another's, and stores none behind them.
  static bool takes_part(const messages::MiniBatchT& batch, std::size_t sequence,
                         std::uint32_t block) {
    const std::uint32_t context = batch.sequences[sequence].context();
    for (const auto& taken : batch.taken_over) {
      if (taken->sequence == sequence && taken->position + taken->tokens.size() == context &&
          context % kBlockTokens != 0 && context / kBlockTokens == block) {
        return true;
      }
    }
    return false;
  }

  struct Buffers {
    std::vector<Block> slots[2];  // loaded: KV buffer, ACT buffer
    std::vector<Block> regenerated;
    std::vector<bool> made;  // slots of `regenerated` that were regenerated
    std::vector<bool> filled[2];
  };

  void run(const messages::MiniBatchT& batch, std::map<std::uint32_t, SymbolicResult>& results) {
    EXPECT_FALSE(batch.sequences.empty());
    EXPECT_LE(static_cast<std::int32_t>(batch.tokens.size()), limits_.rows);
    EXPECT_LE(static_cast<std::int32_t>(batch.sequences.size()), limits_.sequences);
    const bool on_host = check_host(batch);
    EXPECT_TRUE(on_host || !host_began_) << "a mini-batch of the device behind one of host cores";
    host_began_ = on_host;
    Buffers buffers = load(batch);
    regenerate(batch, buffers);
    place_new_rows(batch, buffers);
    store(batch);
    std::vector<std::vector<TokenId>> texts;
    for (const auto& sequence : batch.sequences) {
      texts.push_back(attend(batch, buffers, sequence));
    }
    sample(batch, texts, results);
  }

  // Whether host cores attend it: all of its blocks where they lie, and nothing is loaded.
  static bool check_host(const messages::MiniBatchT& batch) {
    const bool on_host = batch.entries.at(0).where() == messages::Where::HostInPlace;
    for (const auto& entry : batch.entries) {
      EXPECT_EQ(entry.where() == messages::Where::HostInPlace, on_host);
      EXPECT_TRUE(!on_host || (entry.kind() == messages::Kind::Kv &&
                               (entry.place() == messages::Place::Host ||
                                entry.place() == messages::Place::Dropped)));
    }
    EXPECT_TRUE(!on_host || (batch.loads.empty() && batch.regenerate.empty()));
    return on_host;
  }

  Buffers load(const messages::MiniBatchT& batch) {
    Buffers buffers;
    const auto here = std::ssize(pools_[kHere + kKv]);
    const std::int64_t slots[2] = {limits_.kv_slots + here, limits_.act_slots};
    for (const int kind : {kKv, kAct}) {
      buffers.slots[kind].resize(static_cast<std::size_t>(slots[kind]));
      buffers.filled[kind].resize(static_cast<std::size_t>(slots[kind]));
    }
    buffers.regenerated.resize(static_cast<std::size_t>(limits_.act_slots));
    buffers.made.resize(static_cast<std::size_t>(limits_.act_slots));
    for (const auto& run : batch.loads) {
      const int kind = static_cast<int>(run.kind());
      EXPECT_TRUE(run.count() > 0 && run.tail_tokens() >= 1 && run.tail_tokens() <= kBlockTokens);
      ++load_runs_;
      for (std::uint32_t i = 0; i < run.count(); ++i) {
        const std::size_t slot = run.first_slot() + i;
        const Block& from = pools_[pool_of(run)].at(run.first_block() + i);
        EXPECT_FALSE(buffers.filled[kind].at(slot)) << "two loads into one slot";
        expect_memory(run.kind(), run.place(), slot);
        buffers.filled[kind][slot] = true;
        const std::uint32_t tokens = i + 1 == run.count() ? run.tail_tokens() : kBlockTokens;
        for (std::uint32_t t = 0; t < tokens; ++t) {
          EXPECT_TRUE(from[t].has_value()) << "a row is loaded that was never written";
          buffers.slots[kind][slot][t] = from[t];
        }
        loaded_tokens_ += tokens;
      }
    }
    return buffers;
  }

  // The last slots are for blocks that attention reads where they lie.
  void expect_memory(messages::Kind kind, messages::Place place, std::size_t slot) const {
    if (kind == messages::Kind::Kv && place != messages::Place::Gpu) {
      EXPECT_LT(slot, static_cast<std::size_t>(limits_.kv_slots));
    }
  }

  void regenerate(const messages::MiniBatchT& batch, Buffers& buffers) {
    for (const auto& range : batch.regenerate) {
      for (std::uint32_t i = 0; i < range.count(); ++i) {
        const std::size_t slot = range.first_slot() + i;
        EXPECT_TRUE(buffers.filled[kAct].at(slot)) << "an empty slot is regenerated";
        EXPECT_FALSE(buffers.made[slot]) << "a slot is regenerated twice";
        buffers.made[slot] = true;
        buffers.regenerated[slot] = buffers.slots[kAct][slot];
      }
    }
  }

  // The row of a buffer where a position's key and value stand.
  std::optional<Row>& at(const messages::MiniBatchT& batch, Buffers& buffers,
                         const messages::Sequence& sequence, std::uint32_t position) {
    const auto& entry = batch.entries.at(sequence.first_entry() + position / kBlockTokens);
    EXPECT_NE(entry.place(), messages::Place::Dropped) << "position " << position << " is gone";
    if (entry.where() == messages::Where::HostInPlace) {
      return pools_[kKv].at(entry.block())[position % kBlockTokens];
    }
    const bool kv = entry.kind() == messages::Kind::Kv;
    expect_memory(entry.kind(), entry.place(), entry.slot());
    if (entry.where() == messages::Where::Activation) {
      EXPECT_TRUE(absorption_ && !kv && sequence.new_tokens() == 1) << "a row attends activations";
      EXPECT_FALSE(buffers.made.at(entry.slot())) << "a slot is regenerated that nothing reads";
      ++absorbed_rows_;
      return buffers.slots[kAct].at(entry.slot())[position % kBlockTokens];
    }
    EXPECT_EQ(entry.where(), kv ? messages::Where::LoadedKv : messages::Where::RegeneratedKv);
    auto& slots = kv ? buffers.slots[kKv] : buffers.regenerated;
    return slots.at(entry.slot())[position % kBlockTokens];
  }

  void place_new_rows(const messages::MiniBatchT& batch, Buffers& buffers) {
    std::vector<int> owners(batch.tokens.size(), 0);
    std::map<std::pair<int, std::uint32_t>, std::pair<int, std::uint32_t>> slots;  // the block
    std::size_t entries = 0;
    for (std::size_t index = 0; index < batch.sequences.size(); ++index) {
      const auto& sequence = batch.sequences[index];
      const bool again = runs_again(batch, index);
      const std::uint32_t end = sequence.context() + sequence.new_tokens();
      EXPECT_GT(sequence.new_tokens(), 0u);
      EXPECT_EQ(sequence.first_entry(), entries);
      const std::size_t count = static_cast<std::size_t>(ceil_div(end, kBlockTokens));
      for (std::size_t i = 0; i < count; ++i) {
        const auto& entry = batch.entries.at(entries + i);
        if (again) {  // the next sequence has the same entries
          EXPECT_EQ(entry.place(), messages::Place::Nowhere);
          continue;
        }
        const bool in_place = entry.where() == messages::Where::HostInPlace;
        if (entry.place() == messages::Place::Dropped) {
          ++dropped_;
          continue;
        }
        if (in_place) {
          continue;
        }
        const bool nowhere = entry.place() == messages::Place::Nowhere;
        const std::pair block(nowhere ? -1 : pool_of(entry), entry.block());
        const auto [of, fresh] =
            slots.emplace(std::pair(static_cast<int>(entry.kind()), entry.slot()), block);
        EXPECT_TRUE(fresh || (!nowhere && of->second == block)) << "two blocks share a slot";
      }
      if (again) {
        EXPECT_EQ(sequence.context(), 0u);
      } else {
        entries += count;
      }
      for (std::uint32_t i = 0; i < sequence.new_tokens(); ++i) {
        const std::uint32_t row = sequence.first_row() + i;
        ++owners.at(row);
        auto& place = at(batch, buffers, sequence, sequence.context() + i);
        const bool in_place = batch.entries.at(sequence.first_entry()).where() ==
                              messages::Where::HostInPlace;  // what was there may be of before
        EXPECT_TRUE(in_place || !place.has_value()) << "a new row overwrites a loaded one";
        host_rows_ += in_place ? 1 : 0;
        place = Row{sequence.request(), sequence.context() + i, batch.tokens[row]};
      }
    }
    EXPECT_EQ(entries, batch.entries.size());
    EXPECT_TRUE(std::ranges::all_of(owners, [](int n) { return n == 1; }))
        << "every row belongs to one sequence";
  }

  void store(const messages::MiniBatchT& batch) {
    // Where each row must go, by its sequence's entries.
    std::map<std::uint32_t, std::tuple<int, std::uint32_t, std::uint32_t, Row>> wanted;
    for (std::size_t j = 0; j < batch.sequences.size(); ++j) {
      const auto& sequence = batch.sequences[j];
      for (std::uint32_t i = 0; i < sequence.new_tokens(); ++i) {
        const std::uint32_t position = sequence.context() + i;
        const auto& entry = batch.entries.at(sequence.first_entry() + position / kBlockTokens);
        const std::uint32_t row = sequence.first_row() + i;
        if (entry.place() == messages::Place::Nowhere ||
            takes_part(batch, j, position / kBlockTokens)) {
          continue;
        }
        wanted[row] = {pool_of(entry), entry.block(), position % kBlockTokens,
                       Row{sequence.request(), position, batch.tokens.at(row)}};
      }
    }
    for (const auto& store : batch.stores) {
      EXPECT_TRUE(store.count() > 0 && store.token() + store.count() <= kBlockTokens);
      for (std::uint32_t i = 0; i < store.count(); ++i) {
        const auto found = wanted.find(store.row() + i);
        if (found == wanted.end()) {
          ADD_FAILURE() << "a row is stored twice, or is none";
          continue;
        }
        const auto& [pool, block, token, row] = found->second;
        EXPECT_EQ(pool, pool_of(store));
        EXPECT_EQ(block, store.block());
        EXPECT_EQ(token, store.token() + i);
        pools_[pool].at(block)[token] = row;
        wanted.erase(found);
      }
    }
    EXPECT_TRUE(wanted.empty()) << "a new row is not stored";
  }

  std::vector<TokenId> attend(const messages::MiniBatchT& batch, Buffers& buffers,
                              const messages::Sequence& sequence) {
    std::vector<TokenId> text;
    const std::uint32_t end = sequence.context() + sequence.new_tokens();
    for (std::uint32_t p = first_seen(sequence.context()); p < end; ++p) {
      const auto& row = at(batch, buffers, sequence, p);
      EXPECT_TRUE(row.has_value())
          << "attention reads a row that was never written, position " << p;
      const std::uint32_t writer = row.value_or(Row{}).request;
      EXPECT_TRUE(writer == sequence.request() || alike(writer, sequence.request(), p))
          << "position " << p << " is of request " << writer;
      EXPECT_EQ(row.value_or(Row{}).position, p);
      if (p >= first_seen(end - 1)) {  // by the last row
        text.push_back(row.value_or(Row{}).token);
      }
    }
    return text;
  }
  // Whether both prompts are the same up to this position.
  bool alike(std::uint32_t one, std::uint32_t other, std::uint32_t position) const {
    const auto first = prompts_.find(one), second = prompts_.find(other);
    return first != prompts_.end() && second != prompts_.end() && position < first->second.size() &&
           position < second->second.size() &&
           std::equal(first->second.begin(), first->second.begin() + position + 1,
                      second->second.begin());
  }
  std::uint32_t first_seen(std::uint32_t position) const {
    const auto window = static_cast<std::uint32_t>(window_);
    return window_ == 0 || position < window ? 0 : position + 1 - window;
  }

  void sample(const messages::MiniBatchT& batch, const std::vector<std::vector<TokenId>>& texts,
              std::map<std::uint32_t, SymbolicResult>& results) {
    std::set<std::uint32_t> seen;
    for (const auto& sample : batch.samples) {
      EXPECT_TRUE(seen.insert(sample->sequence).second) << "a sequence is sampled twice";
      const auto& sequence = batch.sequences.at(sample->sequence);
      SymbolicResult& result = results[sequence.request()];
      if (sample->generate) {
        result.token = symbolic_token(texts.at(sample->sequence), sample->seed ^ sample->step);
      }
      EXPECT_EQ(sample->prompt_targets.size(), sample->prompt_logprobs ? sequence.new_tokens() : 0);
      for (std::uint32_t i = 0; i < sample->prompt_targets.size(); ++i) {
        if (sample->prompt_targets[i] >= 0) {
          result.prompt_targets.emplace_back(sequence.context() + i, sample->prompt_targets[i]);
        }
      }
    }
  }

  PackLimits limits_;
  std::int32_t max_rows_, window_;
  bool absorption_;
  std::int64_t dropped_ = 0, absorbed_rows_ = 0;
  std::int64_t shared_blocks_ = 0, parts_ = 0;
  std::map<std::uint32_t, std::vector<TokenId>> prompts_;  // of requests that may share rows
  std::vector<Block> pools_[4];
  std::int64_t loaded_tokens_ = 0;
  std::int64_t load_runs_ = 0, host_rows_ = 0;
  bool host_began_ = false;
};

}  // namespace poise
