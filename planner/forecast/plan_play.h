#pragma once
// Plays the iterations of a planned run in virtual time: the scheduler is the run's, and of iterations
// that are alike in rows and context one is executed and stands for the others. Pure.

#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "planner/forecast/plan_setup.h"
#include "planner/schedule/orders.h"
#include "planner/schedule/schedule.h"
#include "planner/virtual_time/virtual_executor.h"

namespace poise {

// What an iteration takes and moves.
struct Cost {
  double seconds = 0;
  double weights = 0, kv = 0, act = 0, stores = 0;  // bytes over the link

  void add(const Cost& other, double times = 1) {
    seconds += times * other.seconds;
    weights += times * other.weights;
    kv += times * other.kv;
    act += times * other.act;
    stores += times * other.stores;
  }
};

// Plays iterations, and remembers those that are alike. REQUIRES: `made` outlives it.
class Player {
 public:
  Player(const SetUp& made, const BatchOptions& batch);

  // Stands until the next call.
  const Cost& cost_of(std::span<const ScheduledChunk> chunks);
  std::size_t played() const { return known_.size(); }

 private:
  Cost play(std::span<const ScheduledChunk> chunks);

  const SetUp& made_;
  const PackLimits limits_;
  const WeightLayout layout_;
  OrderTables tables_;
  VirtualExecutor executor_;
  double weights_ = 0;
  std::uint64_t number_ = 0;
  std::map<std::tuple<long, long, long>, Cost> known_;
};

// Evenly spread over the file, and enough to fill the machine several times.
std::vector<Request> some_of(std::span<const RequestSize> all, std::int32_t sequences);

struct Played {
  Cost total, decode;  // `decode`: of iterations in which no prompt ran, with the most rows
  std::int64_t iterations = 0, decoding = 0, most_rows = 0, preemptions = 0;
  std::int64_t at_a_time = 0;  // requests in an iteration that generate, at most
  double prefill_seconds = 0, prompt_rows = 0;
  std::vector<double> ends;  // when each request ended
};

// All requests to their ends.
Played play(const SetUp& made, Player& player, std::span<const Request> requests);

// How much longer `all` requests take than the played ones: by the rate at which these end while the
// machine is full.
double stretch(const Played& played, std::size_t all, std::int64_t at_a_time);

}  // namespace poise
