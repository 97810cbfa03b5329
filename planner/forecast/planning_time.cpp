#include "planner/forecast/planning_time.h"

#include <array>
#include <chrono>
#include <numeric>
#include <utility>

#include "common/channel.h"
#include "common/files/json.h"
#include "common/liveness/thread_time.h"
#include "planner/forecast/plan_play.h"
#include "planner/requests/request_sizes.h"
#include "planner/schedule/iteration.h"
#include "planner/schedule/weight_stream.h"

namespace poise {
namespace {

Seconds used_time() { return {std::chrono::duration<double>(thread_time()).count()}; }

enum Part { scheduling, packing, tables, orders, serialising, completing, kParts };
constexpr std::array<const char*, kParts> kPartNames{"schedule", "pack",      "tables",
                                                     "orders",   "serialise", "complete"};

struct PartTimes {
  std::array<Seconds, kParts> parts{};
  Seconds predicted{};
  std::int64_t iterations = 0, rows = 0, mini_batches = 0;
  std::uint64_t message_bytes = 0;
  bool prompts = false;  // some rows are of prompts

  void add(const PartTimes& other) {
    for (std::size_t part = 0; part < kParts; ++part) {
      parts[part] += other.parts[part];
    }
    predicted += other.predicted;
    iterations += other.iterations;
    rows += other.rows;
    mini_batches += other.mini_batches;
    message_bytes += other.message_bytes;
  }
};

// Adds the time since the last call, or since its construction, to a part.
class PartClock {
 public:
  explicit PartClock(PartTimes& times) : times_(times), last_(used_time()) {}
  void end(Part part) {
    const Seconds now = used_time();
    times_.parts[part] += now - last_;
    last_ = now;
  }
  void pass_over() { last_ = used_time(); }

 private:
  PartTimes& times_;
  Seconds last_;
};

template <typename Table>
std::uint64_t serialise(Table table) {
  messages::MessageT message;
  message.run_id = "0123456789abcdef";
  message.body.Set(std::move(table));
  flatbuffers::FlatBufferBuilder builder;
  messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, &message));
  return builder.GetSize();
}

// Plans one iteration as the run loop and its link to the executor do.
class TimedPlanner {
 public:
  TimedPlanner(const SetUp& made, Scheduler& scheduler, Player& player)
      : made_(made),
        scheduler_(scheduler),
        player_(player),
        limits_(pack_limits(made.batch, made.placement.device)),
        tables_(made.placement.host, windows_of(made.shape), made.placement.device.absorption),
        weights_(weight_layout(made.shape, made.dtype), made.placement.device) {}

  PartTimes plan() {
    PartTimes times{.iterations = 1};
    PartClock clock(times);
    const auto chunks = scheduler_.next();
    clock.end(scheduling);
    const bool last = scheduler_.last_iteration();
    auto made =
        plan_iteration({.policy = *made_.policy, .host = made_.placement.host, .limits = limits_},
                       chunks, tables_, {.number = ++number_}, [&] { clock.end(packing); });
    clock.end(tables);
    times.mini_batches += std::ssize(made.mini_batches);
    const auto batches = static_cast<std::uint32_t>(made.mini_batches.size());
    times.message_bytes += serialise(std::move(made));
    clock.end(serialising);
    const auto stages = static_cast<std::uint32_t>(made_.shape.num_hidden_layers) + 2;
    for (std::uint32_t stage = 0; stage < stages; ++stage) {
      messages::LayerOrderT order;
      order.iteration = number_;
      order.stage = stage;
      order.mini_batches.resize(batches);
      std::iota(order.mini_batches.begin(), order.mini_batches.end(), 0);
      order.fetch = weights_.next(stage, batches, last);
      clock.end(orders);
      times.message_bytes += serialise(std::move(order));
      clock.end(serialising);
    }
    for (const ScheduledChunk& chunk : chunks) {
      times.rows += chunk.new_tokens;
      times.prompts = times.prompts || chunk.new_tokens > 1;
    }
    times.predicted += {player_.cost_of(chunks).seconds};
    const std::vector<Outcome> outcomes = any_outcomes(chunks);
    clock.pass_over();
    scheduler_.complete(outcomes);
    clock.end(completing);
    return times;
  }

 private:
  const SetUp& made_;
  Scheduler& scheduler_;
  Player& player_;
  const PackLimits limits_;
  OrderTables tables_;
  WeightStream weights_;
  std::uint64_t number_ = 0;
};

nlohmann::ordered_json json_of(const PartTimes& times) {
  nlohmann::ordered_json json{{"iterations", times.iterations},
                              {"rows", times.rows},
                              {"mini_batches", times.mini_batches},
                              {"message_bytes", times.message_bytes},
                              {"predicted_seconds", times.predicted.n}};
  for (int part = 0; part < kParts; ++part) {
    json["seconds"][kPartNames[static_cast<std::size_t>(part)]] =
        times.parts[static_cast<std::size_t>(part)].n;
  }
  return json;
}

}  // namespace

nlohmann::ordered_json time_planning(const PlanOptions& options) {
  const ModelConfig model = read_model_config(options.input.model);
  const RequestSizes sizes = sizes_of_requests(options, model);
  const SetUp made = set_up(options, model, sizes.requests);
  Scheduler scheduler(*made.policy, made.placement.host,
                      schedule_limits(made.batch, made.demand, made.placement.host,
                                      made.placement.device));
  const std::vector<Request> requests = some_of(sizes.requests, made.demand.sequences);
  for (const Request& request : requests) {
    scheduler.add(request);
  }
  Player player(made, made.batch);
  TimedPlanner planner(made, scheduler, player);
  PartTimes prefill, decode;
  for (std::int32_t i = 0; i < options.timed && !scheduler.idle(); ++i) {
    const PartTimes one = planner.plan();
    (one.prompts ? prefill : decode).add(one);
  }
  return {{"machine", made.profile.name},      {"policy", made.policy_name},
          {"requests", sizes.requests.size()}, {"layers", made.shape.num_hidden_layers},
          {"prefill", json_of(prefill)},       {"decode", json_of(decode)}};
}

}  // namespace poise
