#include "planner/plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>

#include "common/model_config.h"
#include "common/trouble.h"
#include "planner/arrangement.h"
#include "planner/orders.h"
#include "planner/request_sizes.h"
#include "planner/tokenizer/tokenizer.h"
#include "planner/virtual_executor.h"

namespace poise {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kAlike = 0.04;             // so far apart, two iterations' numbers count as one
constexpr std::int64_t kSteps = 1'000'000;  // rows of requests that are scheduled at most
constexpr std::int32_t kRefills = 4;        // so often the machine is filled, at most

// What the file's name says of the machine, or the newest profile that was kept for the model.
Profile profile_for(const PlanOptions& options, const ModelShape& shape, DType dtype) {
  if (options.machine) {
    return profile_of(machine_named(*options.machine), shape, dtype);
  }
  if (options.profile) {
    return read_profile_of(*options.profile, shape, dtype);
  }
  std::filesystem::path newest;
  std::optional<Profile> found;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(options.profile_dir, none)) {
    if (entry.path().extension() != ".json" ||
        (found && entry.last_write_time() <= std::filesystem::last_write_time(newest))) {
      continue;
    }
    try {
      Profile profile = read_profile(entry.path());
      if (profile.model == model_fingerprint(shape, dtype)) {
        found = std::move(profile);
        newest = entry.path();
      }
    } catch (const Failure&) {  // of another version
    }
  }
  if (found) {
    return *std::move(found);
  }
  std::string names;
  for (const Machine& machine : machines()) {
    names += (names.empty() ? "" : ", ") + std::string(machine.name);
  }
  fail(
      "what everything costs is not known: name a machine (--machine, one of {}), a file "
      "(--profile), "
      "or measure this one with poise profile",
      names);
}

// How a run would be set up; as Planner decides it.
struct SetUp {
  ModelShape shape{};
  DType dtype{};
  Profile profile;
  std::string policy_name;
  std::unique_ptr<Policy> policy;
  Demand demand;
  Placement placement;
  Bytes cap, overhead, weights, host_allowed;  // `weights`: those that the host keeps
};

SetUp set_up(const PlanOptions& options, const ModelConfig& model,
             std::span<const RequestSize> requests) {
  SetUp made;
  made.shape = model.shape;
  made.dtype = options.dtype.value_or(model.declared.value_or(DType::float32));
  made.profile = profile_for(options, made.shape, made.dtype);
  const bool device_is_host = made.profile.name.starts_with("cpu");
  const bool costs_given = options.policy_options.act_share || options.machine || options.profile;
  made.policy_name = options.policy.value_or(device_is_host && !costs_given ? "kv-only" : "hybrid");
  PolicyOptions policy_options = options.policy_options;
  policy_options.profile = std::make_shared<const Profile>(made.profile);
  made.policy = make_policy(made.policy_name, policy_options);
  made.demand = demand_of(requests, options.batch.max_num_seqs);
  made.weights = weight_layout(made.shape, made.dtype).total();
  made.cap =
      std::min(made.profile.gpu_memory, options.gpu_memory.value_or(made.profile.gpu_memory));
  made.host_allowed =
      std::min(made.profile.host_memory, options.host_memory.value_or(made.profile.host_memory));
  if (made.weights > made.host_allowed) {
    fail(
        "host memory: the weights are {:.2f} GiB, {:.2f} GiB are allowed: raise --host-memory, or "
        "take a machine that has more",
        static_cast<double>(made.weights.n) / static_cast<double>(kGiB.n),
        static_cast<double>(made.host_allowed.n) / static_cast<double>(kGiB.n));
  }
  const BlockBudget budget{.weights = made.weights,
                           .available = made.profile.host_memory - made.weights,
                           .host_memory = options.host_memory};
  const Arrangement arranged =
      arrange(*made.policy, made.shape, made.dtype, made.demand, options.batch, budget,
              {.cap = made.cap,
               .overhead = made.profile.gpu_overhead,
               .is_host = device_is_host,
               .holds_blocks = !device_is_host || options.gpu_memory.has_value()});
  made.placement = {arranged.host, arranged.device};
  made.overhead = arranged.overhead;
  made.weights =
      made.weights - weight_layout(made.shape, made.dtype).layer.bytes * arranged.released_layers;
  return made;
}

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

// Plays iterations, and remembers those that are alike.
class Player {
 public:
  Player(const SetUp& made, const BatchOptions& batch)
      : made_(made),
        limits_(pack_limits(batch, made.placement.device)),
        layout_(weight_layout(made.shape, made.dtype)),
        tables_(made.placement.host),
        executor_(made.profile, layout_, made.placement.device) {
    const std::int32_t streamed =
        made.shape.num_hidden_layers - made.placement.device.resident_layers;
    weights_ = streamed <= 2 ? 0 : static_cast<double>(layout_.layer.bytes.n) * streamed;
  }

  const Cost& cost_of(std::span<const Part> parts) {
    double decoding = 0, prompts = 0, context = 0;
    for (const Part& part : parts) {
      (part.new_tokens == 1 ? decoding : prompts) += part.new_tokens;
      context += part.context;
    }
    const auto bucket = [](double n) { return std::lround(std::log1p(n) / kAlike); };
    const auto [at, fresh] =
        known_.try_emplace({bucket(decoding), bucket(prompts), bucket(context)});
    if (fresh) {
      at->second = play(parts);
    }
    return at->second;
  }
  std::size_t played() const { return known_.size(); }

 private:
  Cost play(std::span<const Part> parts) {
    const auto items = pack_items(parts);
    const auto batches = made_.policy->pack(made_.placement.host, items, limits_);
    const auto tables = tables_.build(++number_, 1, parts, items, batches);
    if (number_ == 1) {  // the weights of the first two layers, which others find fetched
      executor_.run(tables, false);
    }
    const Seconds before = executor_.now();
    executor_.run(tables, false);
    Cost cost{.seconds = (executor_.now() - before).n, .weights = weights_};
    const BlockSizes sizes = block_sizes(made_.shape, made_.dtype);
    const double layers = made_.shape.num_hidden_layers;
    for (const auto& batch : tables.mini_batches) {
      for (const messages::BlockRun& run : batch->loads) {
        if (run.place() == messages::Place::Host) {
          const bool kv = run.kind() == messages::Kind::Kv;
          const double rows = (run.count() - 1.0) * kBlockTokens + run.tail_tokens();
          (kv ? cost.kv : cost.act) +=
              rows * layers * static_cast<double>(sizes.row(kv ? BlockKind::kv : BlockKind::act).n);
        }
      }
      for (const messages::Store& store : batch->stores) {
        if (store.place() == messages::Place::Host) {
          const bool kv = store.kind() == messages::Kind::Kv;
          cost.stores += store.count() * layers *
                         static_cast<double>(sizes.row(kv ? BlockKind::kv : BlockKind::act).n);
        }
      }
    }
    return cost;
  }

  const SetUp& made_;
  const PackLimits limits_;
  const WeightLayout layout_;
  OrderTables tables_;
  VirtualExecutor executor_;
  double weights_ = 0;
  std::uint64_t number_ = 0;
  std::map<std::tuple<long, long, long>, Cost> known_;
};

// Evenly spread over the file, so many that the machine is filled several times.
std::vector<Request> some_of(std::span<const RequestSize> all, std::int32_t sequences) {
  double answers = 0;
  for (const RequestSize& one : all) {
    answers += one.answer;
  }
  const double each = std::max(1.0, answers / static_cast<double>(all.size()));
  const auto count = static_cast<std::size_t>(
      std::clamp<double>(std::min(static_cast<double>(kSteps) / each, double{kRefills} * sequences),
                         std::min<double>(3.0 * sequences, static_cast<double>(all.size())),
                         static_cast<double>(all.size())));
  std::vector<Request> some(count);
  for (std::size_t i = 0; i < count; ++i) {
    const RequestSize& one = all[i * all.size() / count];
    some[i].id = one.id;
    some[i].prompt.assign(static_cast<std::size_t>(one.prompt), TokenId{0});
    some[i].sampling.max_tokens = one.answer;
  }
  return some;
}

struct Played {
  Cost total, decode;  // `decode`: of iterations in which no prompt ran, with the most rows
  std::int64_t iterations = 0, decoding = 0, most_rows = 0, preemptions = 0;
  double prefill_seconds = 0, prompt_rows = 0;
  std::vector<double> ends;  // when each request ended
};

Played play(const SetUp& made, Player& player, std::span<const Request> requests) {
  Scheduler scheduler(*made.policy, made.placement.host,
                      schedule_limits(made.demand, made.placement.host, made.placement.device));
  for (const Request& request : requests) {
    scheduler.add(request);
  }
  Played played;
  std::vector<Outcome> outcomes;
  while (!scheduler.idle()) {
    const auto parts = scheduler.next();
    const Cost& cost = player.cost_of(parts);
    played.total.add(cost);
    ++played.iterations;
    double prompts = 0;
    outcomes.clear();
    for (const Part& part : parts) {
      prompts += part.new_tokens > 1 ? part.new_tokens : 0;
      if (part.complete()) {
        const Request& request = *part.request->request;
        const bool ends = part.request->answered() + 1 >= request.sampling.max_tokens;
        outcomes.push_back({request.id, ends ? std::nullopt : std::optional(TokenId{0})});
        if (ends) {
          played.ends.push_back(played.total.seconds);
        }
      }
    }
    const std::int64_t rows = std::ssize(parts);
    if (prompts > 0) {
      played.prefill_seconds += cost.seconds;
      played.prompt_rows += prompts;
    } else if (rows >= played.most_rows) {
      if (rows > played.most_rows) {
        played.decode = {};
        played.decoding = 0;
        played.most_rows = rows;
      }
      played.decode.add(cost);
      ++played.decoding;
    }
    scheduler.complete(outcomes);
  }
  played.preemptions = scheduler.preemptions();
  return played;
}

// How much longer all requests take than the played ones: by the rate at which these end while the
// machine is full. Requests that are alike end in bursts, each of as many as run at a time, so the rate
// is counted over whole refills, the last, which nobody follows, aside.
double stretch(const Played& played, std::size_t all, std::int64_t at_a_time) {
  const std::size_t some = played.ends.size();
  if (some >= all) {
    return 1;
  }
  const auto refill = static_cast<std::size_t>(at_a_time);
  const std::size_t refills = some / refill;
  double each = played.total.seconds / static_cast<double>(some);
  if (refills >= 3) {
    const std::size_t counted = (refills - 2) * refill;
    const std::size_t last = some - refill - 1;
    each = (played.ends[last] - played.ends[last - counted]) / static_cast<double>(counted);
  }
  return 1 + each * static_cast<double>(all - some) / played.total.seconds;
}

Json bytes_of(const Cost& cost, double times) {
  const auto whole = [&](double bytes) { return std::llround(times * bytes); };
  return {{"weights", whole(cost.weights)},
          {"kv", whole(cost.kv)},
          {"act", whole(cost.act)},
          {"stores", whole(cost.stores)}};
}

Json memory_of(const SetUp& made) {
  const BlockSizes sizes = block_sizes(made.shape, made.dtype);
  const Allocation& host = made.placement.host;
  const std::int64_t layers = made.shape.num_hidden_layers;
  Json gpu = Json::array();
  const DeviceMemoryPlan plan =
      plan_device_memory(made.shape, made.dtype, made.placement.device, made.overhead);
  for (const DeviceMemoryLine& line : plan.lines) {
    gpu.push_back({{"name", line.name}, {"bytes", line.bytes.n}, {"what", line.what}});
  }
  const auto blocks = [&](BlockKind kind, std::uint32_t count) {
    return sizes.block(kind).n * count * layers;
  };
  return {{"host",
           {{"weights", made.weights.n},
            {"act_blocks", blocks(BlockKind::act, host.act_blocks)},
            {"kv_blocks", blocks(BlockKind::kv, host.kv_blocks)},
            {"allowed", made.host_allowed.n}}},
          {"gpu", {{"lines", gpu}, {"total", plan.total.n}, {"allowed", made.cap.n}}}};
}

}  // namespace

nlohmann::ordered_json plan_run(const PlanOptions& options) {
  const ModelConfig model = read_model_config(options.input.model);
  std::unique_ptr<const Tokenizer> tokenizer;
  if (!options.input.skip_tokenizer_init) {
    tokenizer = std::make_unique<const Tokenizer>(
        Tokenizer::load(options.input.model, model.shape.vocab_size));
  }
  const std::int32_t positions = model.shape.max_position_embeddings;
  const RequestSizes sizes = read_request_sizes(
      options.input.input,
      {.context = std::min(options.input.max_model_len.value_or(positions), positions),
       .vocab_size = model.shape.vocab_size,
       .tokenizer = tokenizer.get(),
       .run_seed = options.input.seed});
  if (sizes.requests.empty()) {
    fail("{}: there is no request in it that could run", options.input.input.string());
  }
  const SetUp made = set_up(options, model, sizes.requests);
  Player player(made, options.batch);
  const std::vector<Request> some = some_of(sizes.requests, made.demand.sequences);
  const Played played = play(made, player, some);
  const double times = stretch(played, sizes.requests.size(), played.most_rows);
  std::int64_t answers = 0, prompts = 0;
  for (const RequestSize& one : sizes.requests) {
    answers += one.answer;
    prompts += one.prompt;
  }
  const double seconds = times * played.total.seconds;
  const auto decoding = static_cast<double>(std::max<std::int64_t>(played.decoding, 1));
  const Allocation& host = made.placement.host;
  return {{"machine", made.profile.name},
          {"measured", !made.profile.measured.empty()},
          {"dtype", std::string(name_of(made.dtype))},
          {"policy", made.policy_name},
          {"requests", sizes.requests.size()},
          {"refused_lines", sizes.refused},
          {"estimated", sizes.estimated},
          {"prompt_tokens", prompts},
          {"answer_tokens", answers},
          {"at_a_time", played.most_rows},
          {"blocks",
           {{"act", host.act_blocks},
            {"kv", host.kv_blocks},
            {"act_on_gpu", host.gpu_act_blocks},
            {"kv_on_gpu", host.gpu_kv_blocks}}},
          {"resident_layers", made.placement.device.resident_layers},
          {"layers", made.shape.num_hidden_layers},
          {"memory", memory_of(made)},
          {"decode_iteration_seconds", played.decode.seconds / decoding},
          {"decode_tokens_per_second", played.decoding > 0 ? static_cast<double>(played.most_rows) *
                                                                 decoding / played.decode.seconds
                                                           : 0},
          {"decode_iteration_bytes", bytes_of(played.decode, 1 / decoding)},
          {"prefill_tokens_per_second",
           played.prefill_seconds > 0 ? played.prompt_rows / played.prefill_seconds : 0},
          {"prefill_seconds", times * played.prefill_seconds},
          {"tokens_per_second", static_cast<double>(answers) / seconds},
          {"bytes", bytes_of(played.total, times)},
          {"seconds", seconds},
          {"scheduled_requests", some.size()},
          {"played_iterations", player.played()}};
}

}  // namespace poise
