#pragma once
// An independent check of an order log (`poise inspect --check`). From the log alone, and the meaning of
// orders in common/messages.fbs, it tracks which rows lie where, and names every order that could not
// have given right answers. It shares no code with the parts that make orders or check them before they
// run. It checks:
//
//   rows      a mini-batch loads only rows that were stored before, and attention reads the rows of the
//             sequence's request, at its positions, made from its tokens; or those of another request
//             whose text is the same up to there
//   entries   of a sequence cover its context and new rows; no slot and no block belongs to two of them, unless both
//             only read the block
//   dropped   are only blocks that no row of a sequence sees in any layer
//   stores    put each new row once to the place that its sequence's entries name; none puts rows behind a part that
//             was taken over from another's block
//   tokens    a request's rows continue its text: its prompt, then its sampled tokens; of those that it never runs,
//             since it took over their rows, the orders name the ids
//   prompts   a request's prompt has the same length in each mini-batch; its first token is sampled behind it
//   weights   each streamed layer is whole when it is computed, fetched once for it, in two buffers
//   orders    come stage by stage, each mini-batch once in each, no more of them than credits
//   host      cores attend whole mini-batches, from KV blocks of the host, last of each order; they read nothing that
//             the device stores in the same iteration
//   bounds    of pools, slots, rows, sequences and contexts, as granted and configured
//
// Of a log that begins in the middle of a run it takes on trust what was stored, sampled and fetched before,
// and counts it. Where a log keeps tables alone, it checks no orders of layers and no weights.
// After a Configure, device buffers are empty and no iteration is under way. Blocks on the device stay
// valid if the Configure asks for the same numbers; blocks of a pool stay valid as long as the pool exists
// (run and epoch), so a planner that takes over may use them.
// Reads a log once, from beginning to end.

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/files/order_log_segments.h"
#include "common/messages_generated.h"
#include "common/units.h"

namespace poise {

struct LogCheckReport {
  std::uint64_t violations = 0;
  std::vector<std::string> first;  // of them, at most kViolationsTold
  std::uint64_t iterations = 0, mini_batches = 0, rows = 0;
  std::uint64_t blocks_loaded = 0, rows_read = 0, rows_stored = 0, pieces_fetched = 0;
  std::uint64_t starts = 0;           // Configures
  std::uint64_t trusted_rows = 0;     // of context, stored before the log begins
  std::uint64_t thin_iterations = 0;  // without orders of layers
  LogExtent extent;
  Bytes torn;  // at the end, not read: a process was killed in the middle of a record

  // `where`: "iteration 12, mini-batch 3, sequence 1 (request 7)".
  void add_violation(const std::string& where, const std::string& what);
};
inline constexpr std::size_t kViolationsTold = 10;

// Fails if the log cannot be read.
LogCheckReport check_log(const std::filesystem::path& path);
// "12 iterations, …: every order holds", or the first violations, a line each.
std::string to_text(const LogCheckReport& report);

// The contents of one row of a block or of a slot.
struct CheckedRow {
  std::uint32_t request = 0;  // 0: never written
  std::uint32_t position = 0;
  TokenId token = -1;
  std::uint64_t text = 0;  // digest of the request's tokens up to this one; 0: not all are known

  friend bool operator==(const CheckedRow&, const CheckedRow&) = default;
};
using CheckedBlock = std::array<CheckedRow, kBlockTokens>;

// Kind, place and number, as messages name them.
struct CheckedBlockName {
  messages::Kind kind;
  messages::Place place;
  std::uint32_t number;

  friend auto operator<=>(const CheckedBlockName&, const CheckedBlockName&) = default;
};
std::string to_text(const CheckedBlockName& block);

// The contents of blocks, which mini-batches read and change.
class CheckedMemory {
 public:
  void forget_device();
  void forget_host();
  // Nothing if no order has stored to the block.
  const CheckedBlock* find(const CheckedBlockName& block) const;
  CheckedBlock& at(const CheckedBlockName& block) { return blocks_[block]; }

 private:
  struct Hash {
    std::size_t operator()(const CheckedBlockName& name) const {
      return std::size_t{name.number} * 8 + static_cast<std::size_t>(name.kind) * 4 +
             static_cast<std::size_t>(name.place);
    }
  };
  std::unordered_map<CheckedBlockName, CheckedBlock, Hash> blocks_;
};

// A request's text, known from its rows and results.
class CheckedText {
 public:
  bool sampled = false;                 // from here on only results add to it
  std::optional<std::uint32_t> prompt;  // its tokens, as the first mini-batch says

  std::size_t size() const { return tokens_.size(); }
  // -1 if it is not known: another sequence of the request has cut it off before, or the log begins behind it.
  TokenId at(std::uint64_t position) const {
    return position < tokens_.size() ? tokens_[position] : -1;
  }
  // Of the tokens up to this one; 0 if one of them is not known.
  std::uint64_t digest(std::uint64_t position);
  // Ends there, with tokens that are not known if it was shorter.
  void resize(std::size_t size);
  // REQUIRES: position <= size().
  void set(std::size_t position, TokenId token);
  void push(TokenId token) { tokens_.push_back(token); }

 private:
  std::vector<TokenId> tokens_;
  std::vector<std::uint64_t> digests_;  // of its first tokens
};

class CheckedWeights;

class LogCheck {
 public:
  // `layers`, `pieces` (of a layer's weights) and `window` (of all layers; 0: not all have one) as the log's
  // header has them.
  LogCheck(std::int32_t layers, std::size_t pieces, std::int64_t window = 0);
  ~LogCheck();

  // What came before is unknown.
  void begin_in_the_middle();
  // `keeps`: what the log has where the message stands.
  void take(const messages::Message& message, LogKeeps keeps = LogKeeps::full);
  const LogCheckReport& report() const { return report_; }

 private:
  friend class MiniBatchCheck;

  struct Order {  // of the iteration under way
    std::uint64_t number = 0;
    std::uint32_t mini_batches = 0, next_stage = 0;
    // Mini-batch b loads rows that mini-batch a stores in the same iteration.
    std::set<std::pair<std::uint32_t, std::uint32_t>> before;
    std::map<CheckedBlockName, std::uint32_t> stored;  // in this iteration, by which mini-batch
    std::map<std::uint32_t, bool> samples;             // by request: whether a token is to come
    std::map<std::uint32_t, std::vector<std::uint32_t>> masks;  // of the tokens that it may be
    bool thin = false;                                 // its layers' orders are not in the log
    std::set<std::uint32_t> on_host;                   // mini-batches that host cores attend

    bool bars(std::uint32_t request, TokenId token) const;
    // A mini-batch reads that block: what another one stores there must come before.
    void read(const CheckedBlockName& name, std::uint32_t mini_batch) {
      const auto found = stored.find(name);
      if (found != stored.end() && found->second != mini_batch) {
        before.emplace(found->second, mini_batch);
      }
    }
  };

  void take(const messages::ConfigureT& configure);
  void take(const messages::IterationT& iteration, const std::string& run);
  void take(const messages::LayerOrderT& order);
  void take(const messages::IterationDoneT& done);
  void check_sharing(const messages::IterationT& iteration);
  void check_mini_batches(const messages::LayerOrderT& order, const std::string& where);
  void violation(const std::string& where, const std::string& what) {
    report_.add_violation(where, what);
  }

  std::int32_t layers_;
  std::int64_t window_;  // beyond which no layer sees anything; 0: some layers have none
  LogCheckReport report_;
  std::unique_ptr<CheckedWeights> weights_;
  std::optional<messages::ConfigureT> configure_;
  std::optional<messages::PoolGrantT> grant_;
  std::string pool_;  // run and epoch
  CheckedMemory memory_;
  std::unordered_map<std::uint32_t, CheckedText> texts_;
  std::set<std::uint32_t>
      reopened_;                // begun before the last Configure: their answers may begin anew
  std::optional<Order> order_;  // the last iteration
  bool late_ = false;           // what came before the log is unknown
  LogKeeps keeps_ = LogKeeps::full;
  std::uint32_t credits_ = 0, undone_ = 0;
};

}  // namespace poise
