#pragma once
// How link, computation and host cores were balanced: per iteration T_PCIe and T_compute (CAPTURE Eq. 2-4,
// measured instead of predicted) and T_host, what either side waited for, and F_b of the mini-batches (Eq. 6 and 7, with all
// that a mini-batch computes over all that it loads); and conclusions in words. All are sums of the
// executor's reports on layer orders. Pure; one thread.

#include <cstdint>
#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "common/blocks.h"
#include "common/messages_generated.h"
#include "common/units.h"

namespace poise {

// Sums over some orders or iterations. If wall time is known, the time that is neither busy nor waiting
// is time without an order.
struct BalanceSums {
  std::int64_t iterations = 0, orders = 0, mini_batches = 0;
  Seconds wall{};                                   // from results to results
  Seconds pcie{}, compute{}, back{};                // T_PCIe, T_compute; stores, the other way
  Seconds host{};                                   // T_host: host cores attended
  Seconds for_weights{}, for_blocks{}, for_rows{};  // computation waited
  Seconds for_host{};                               // … for host cores
  Seconds for_buffers{};                            // the link waited, for computation to free them
  std::uint64_t weights = 0, kv = 0, act = 0, stores = 0;  // bytes over the link
  std::uint64_t host_read = 0;        // bytes of KV rows that host cores read, beside the link
  std::uint64_t host_rows = 0;        // … of their output, over the link
  std::int64_t act_blocks = 0;        // regenerated, wherever they lay
  double f_b = 0;                     // sum over …
  std::int64_t f_b_mini_batches = 0;  // … these mini-batches, which load and compute

  void add(const BalanceSums& other);
  Seconds compute_waits() const { return for_weights + for_blocks + for_rows + for_host; }
  double mean_f_b() const;  // 0: of none
};

// Eq. 6 and 7; 0 if one of the two takes no time.
double f_b(Seconds compute, Seconds load);

// Of one order. It assumes that mini-batches' blocks load at the speed of all the order's loads.
BalanceSums balance_of(const messages::LayerDone& done, const BlockSizes& sizes);
BalanceSums balance_of(const messages::LayerDoneT& done, const BlockSizes& sizes);

// An iteration by its tables: its number, and whether every sequence of it generates. Rows that are not
// kept and run again in every iteration count as generating.
struct IterationKind {
  std::uint64_t number = 0;
  bool decodes = false;
  std::size_t mini_batches = 0;
};
IterationKind kind_of(const messages::IterationT& tables);

class Balance {
 public:
  static constexpr std::size_t kLast = 8;
  struct Iteration {
    IterationKind kind;
    BalanceSums sums;
  };

  explicit Balance(const BlockSizes& sizes) : sizes_(sizes) {}

  void begin(const IterationKind& kind, Seconds now);
  void take(const messages::LayerDone& done) { open_.sums.add(balance_of(done, sizes_)); }
  void take(const messages::LayerDoneT& done) { open_.sums.add(balance_of(done, sizes_)); }
  void end(Seconds now);  // results are there
  // Another attempt begins; the time until its first iteration is not counted.
  void pause() { since_ = {-1}; }

  const BlockSizes& sizes() const { return sizes_; }
  const BalanceSums& all() const { return all_; }
  // All but the first iteration of each attempt, in which memory is pinned and libraries begin.
  const BalanceSums& settled() const { return settled_; }
  const BalanceSums& decode() const { return decode_; }        // iterations that only generate
  const std::deque<Iteration>& last() const { return last_; }  // the newest last

 private:
  BlockSizes sizes_;
  Iteration open_;
  Seconds since_{-1};  // the last results, or the first iteration's begin
  bool starting_ = true;
  BalanceSums all_, settled_, decode_;
  std::deque<Iteration> last_;
};

// Whether more requests could have been under way at a time. `slower`: the policy chose fewer because
// the job then ends sooner.
enum class MoreRequests : std::uint8_t { unknown, possible, none, slower };

// What the words depend on besides the sums.
struct BalanceFacts {
  std::string device = "GPU";  // what it is called
  MoreRequests more_requests = MoreRequests::unknown;
  bool act_is_smaller = true;  // an ACT block is, than a KV block
  std::int64_t without_reports = 0;  // iterations left out: no reports on them were kept
};
// "While generating, the link was busy 96 % of the time and the GPU 31 %. More ACT would …" It judges
// iterations that only generate; if they are too few, all but the first, which includes start-up; if
// those are too few, all.
std::string words(const Balance& balance, const BalanceFacts& facts);

// Times in seconds; shares of wall time if that is known.
nlohmann::ordered_json json_of(const BalanceSums& sums);
// {"words", "whole", "generating", "last": [{"iteration", …}]}; where iterations are left out,
// their number in "without_reports", and no sums if these are all.
nlohmann::ordered_json json_of(const Balance& balance, const BalanceFacts& facts);

}  // namespace poise
