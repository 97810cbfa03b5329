#include "planner/replay/replay.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/files/regular_file.h"
#include "common/files/sha256.h"
#include "common/process.h"
#include "common/words.h"
#include "planner/links/clock.h"
#include "planner/record/log_extent.h"
#include "planner/record/log_note.h"

namespace poise {
namespace {

constexpr Seconds kWait{0.1};  // for messages, where nothing else is to be done
constexpr Seconds kShortWait{0.005};

// The orders mean the same only for the same model and for programs that agree about orders.
void check_model(const LogDigest& log, const std::filesystem::path& path,
                 const ControlSegment& control) {
  const std::string what = fmt::format("the header of {}", path.string());
  const nlohmann::json json = parse_json(log.facts().header, what);
  const JsonObject header(json, what);
  const std::string build = header.string("build").value_or("");
  if (build != build_id()) {
    fail("order log {} was written by another build ({}), this is {}: replay it with that build",
         path.string(), build, build_id());
  }
  const std::string dtype = header.string("dtype").value_or("");
  if (dtype != name_of(control.dtype)) {
    fail("order log {} was recorded with --dtype {}, the model is loaded as {}", path.string(),
         dtype, name_of(control.dtype));
  }
  if (header.string("model").value_or("") != to_hex(std::to_array(control.fingerprint))) {
    fail(
        "order log {} was recorded with another model, or with other weights of this one: replay "
        "it with "
        "the --model, --quantization, --pack-weights, --load-format and --seed of its run",
        path.string());
  }
  const nlohmann::json expected =
      nlohmann::json::parse(order_log_header(control, "", log.facts().kv_format));
  for (const auto& [name, value] : expected.items()) {
    if (name != "run_id" && json.contains(name) && json[name] != value) {
      fail("the header of {} is damaged: {} is {}, the model that it names has {}", path.string(),
           name, shown(json[name].dump()), value.dump());
    }
  }
}

}  // namespace

Replay::Replay(ReplayOptions options)
    : options_(std::move(options)),
      digest_(options_.orders),
      control_(Control::attach(options_.run_id)),
      status_file_(options_.run_dir) {
  require_replayable(digest_.extent(), options_.orders);
  status_.run_id = options_.run_id;
  status_.state = "replaying";
}

void Replay::run() {
  await_model();
  greet();
  for (std::int32_t i = 0; i < options_.repeat; ++i) {
    replay_once();
  }
  report_.write(options_.output, options_.orders, links_.executor->greeting()->device,
                links_.executor->link_bytes_per_s(), digest_.torn_tail(),
                missing_text(digest_.extent()));
  leave_loader();
  if (options_.death_descriptor < 0) {
    links_.executor->stop("all is replayed");
  }
}

// ---- with whom

void Replay::await_model() {
  while (!weights_sealed(*control_)) {
    tick();
    usleep(static_cast<useconds_t>(kShortWait.n * 1e6));
  }
  check_model(digest_, options_.orders, *control_);
}

void Replay::greet() {
  replayed_ = options_.replayed.empty()
                  ? std::make_unique<OrderLog>()
                  : std::make_unique<OrderLog>(
                        options_.replayed,
                        order_log_header(*control_, options_.run_id, digest_.facts().kv_format));
  links_ = open_links(*control_, options_.run_id, options_.executor_socket, options_.loader_socket,
                      options_.host_memory, digest_.facts().kv_format, *replayed_);
  await([&] { return links_.loader->greeted() && links_.executor->greeting(); });
  links_.executor->watch([&](const messages::LayerDone& done) {
    messages::LayerDoneT report;
    done.UnPackTo(&report);
    report_.take(report);
  });
  links_.loader->release(true);  // what an ended planner of a kept loader left
  restore_weights();
}

// True where a message was sent or received.
bool Replay::tick() {
  if (stop_requested()) {
    fail(Exit::interrupted, "interrupted");
  }
  bool moved = false;
  if (links_.loader) {
    const bool asked = !links_.loader->greeted() || links_.loader->gives_back() ||
                       links_.loader->asked_for_weights() || !links_.loader->settled() ||
                       !links_.loader->grant();
    moved = links_.loader->step(asked ? kShortWait : Seconds{0});
    moved = links_.executor->step(asked ? kShortWait : kWait) || moved;
  }
  status_.measured = digest_.share_read();
  status_file_.write(status_, monotonic_now());
  if (moved) {
    control_->progress[static_cast<int>(Process::planner)].steps.fetch_add(
        1, std::memory_order_release);
  }
  return moved;
}

template <typename Condition>
void Replay::await(Condition condition) {
  while (!condition()) {
    tick();
    if (links_.executor->returned() || links_.executor->gone()) {
      fail(Exit::interrupted, "the gpu_executor is gone, and with it the state of the replay");
    }
  }
}

// ---- record by record

void Replay::replay_once() {
  report_.begin(digest_.facts().layers);
  release_pool();
  digest_.read({
      .until = options_.until,
      .iteration = [&](const LoggedIteration& iteration) { replay(iteration); },
      .configure = [&](const messages::ConfigureT& configure,
                       double) { replay(messages::ConfigureT(configure)); },
      .ready = {},
      .policy =
          [&](const messages::PolicyInForceT& policy, double) {
            log_note(*replayed_, options_.run_id, messages::PolicyInForceT(policy));
          },
      .pool = [&](const messages::PoolGrantT& pool,
                  const std::string& run_id) { replay(pool, run_id); },
      .weights = [&](const messages::WeightsHeldT& held) { replay(held); },
  });
  if (report_.iterations() == 0) {
    fail("order log {} has no finished iteration{}", options_.orders.string(),
         options_.until ? fmt::format(" up to {}", *options_.until) : "");
  }
}

void Replay::replay(const messages::PoolGrantT& recorded, const std::string& run_id) {
  pool_is_noted_ = true;
  recorded_pool_ = recorded.pool_epoch;
  const std::string name =
      fmt::format("{} {} {}", run_id, recorded.pool_epoch, recorded.region_bytes);
  LoaderLink& loader = *links_.loader;
  if (name != pool_) {
    release_pool();
    if (!std::exchange(device_holds_, false)) {
      restore_weights();
    }
    loader.claim(recorded.region_bytes,
                 {.act_blocks = recorded.act_blocks, .kv_blocks = recorded.kv_blocks});
    pool_ = name;
  } else if (const PoolPartition& pool = loader.grant()->partition;
             pool.act_blocks != recorded.act_blocks || pool.kv_blocks != recorded.kv_blocks) {
    loader.move_border(recorded.act_blocks, recorded.kv_blocks);
  }
  await([&] { return loader.grant() && loader.settled(); });
  messages::PoolGrantT note = recorded;
  note.pool_epoch = loader.grant()->pool_epoch;
  log_note(*replayed_, options_.run_id, std::move(note));
}

// A Configure that no PoolGrant precedes has the device hold layers, or unmap the pool that is made anew.
void Replay::replay(messages::ConfigureT configure) {
  if (!std::exchange(pool_is_noted_, false)) {
    release_pool();
    if (configure.resident_layers != resident_) {
      restore_weights();
    }
    device_holds_ = true;
  }
  resident_ = configure.resident_layers;
  configure.trace = false;
  links_.executor->configure(std::move(configure));
  await([&] { return links_.executor->ready(); });
}

void Replay::replay(const messages::WeightsHeldT& held) {
  const auto released = control_->released_layers.load(std::memory_order_acquire);
  if (held.released_layers > 0 && static_cast<std::uint32_t>(held.released_layers) != released) {
    links_.loader->release_weights(held.released_layers);
    await([&] { return !links_.loader->asked_for_weights(); });
    log_note(*replayed_, options_.run_id, messages::WeightsHeldT(held));
  }
}

void Replay::replay(const LoggedIteration& iteration) {
  const std::uint64_t number = iteration.tables.iteration;
  if (!iteration.done) {  // a process ended meanwhile, or the run is still at it
    report_.skip();
    return;
  }
  pool_is_noted_ = false;
  ExecutorLink& executor = *links_.executor;
  if (!links_.loader->grant() || !executor.ready()) {
    fail("order log {}: iteration {} comes before a pool and a Configure", options_.orders.string(),
         number);
  }
  if (iteration.tables.pool_epoch != recorded_pool_) {
    fail("order log {}: iteration {} is for pool {}, pool {} was granted", options_.orders.string(),
         number, iteration.tables.pool_epoch, recorded_pool_);
  }
  if (iteration.layers.size() != static_cast<std::size_t>(digest_.facts().layers) + 2) {
    fail("order log {}: iteration {} has {} layer orders, the model needs {}",
         options_.orders.string(), number, iteration.layers.size(), digest_.facts().layers + 2);
  }
  messages::IterationT tables = iteration.tables;
  tables.pool_epoch = links_.loader->grant()->pool_epoch;
  std::vector<messages::LayerOrderT> orders;
  for (const LoggedLayer& layer : iteration.layers) {
    orders.push_back(layer.order);
  }
  const Seconds begun = monotonic_now();
  std::optional<Received> answers;
  try {
    executor.begin(std::move(tables), std::move(orders));
    await([&] { return (answers = executor.take_results()).has_value(); });
  } catch (const Failure& refusal) {
    if (refusal.code() != Exit::internal) {
      throw;
    }
    fail("order log {}, iteration {}: {}", options_.orders.string(), number, refusal.what());
  }
  const Seconds wall = monotonic_now() - begun;
  messages::IterationDoneT replayed;
  (*answers)->body_as_IterationDone()->UnPackTo(&replayed);
  report_.take(iteration, replayed, wall);
}

void Replay::restore_weights() {
  await([&] { return !links_.loader->gives_back(); });
  if (control_->released_layers.load(std::memory_order_acquire) > 0) {
    links_.loader->restore_weights();
    await([&] { return !links_.loader->asked_for_weights(); });
  }
}

// As a planner does: a kept loader reads released weights again by itself.
void Replay::leave_loader() {
  release_pool();
  if (control_->released_layers.load(std::memory_order_acquire) > 0) {
    links_.loader->restore_weights();
    links_.loader->release(true);  // whose answer says that all was heard
    await([&] { return !links_.loader->gives_back(); });
  }
}

void Replay::release_pool() {
  pool_.clear();
  links_.loader->release();
  await([&] { return !links_.loader->gives_back(); });
}

}  // namespace poise
