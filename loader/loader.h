#pragma once
// Process 1: owns host memory. It reads a model into the sealed weight segment. It makes and
// re-partitions the block pool for the connected planner, over HOME/loader.sock. It outlives planners
// and executors, and removes its segments when it ends. One thread calls `step`; other threads load
// weights and make pools, so that a step never takes long.
//
//   segment                        is there
//   poise-UID-RUN-control          from construction to destruction
//   poise-UID-RUN-weights          from state `loading` on; sealed once every byte is there
//   poise-UID-RUN-blocks-EPOCH     from a granted PoolClaim to the next claim, PoolRelease or the end

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/channel.h"
#include "common/shared_memory.h"
#include "loader/host_budget.h"
#include "loader/model_on_disk.h"
#include "loader/pool_keeper.h"
#include "loader/weight_check.h"
#include "loader/weight_loading.h"

namespace poise {

struct LoaderOptions {
  std::filesystem::path model;
  std::filesystem::path home;  // of loader.sock and loader.json; this user's alone
  std::string run_id;          // lower-case hex
  std::optional<DType> dtype;  // nothing: auto
  LoadFormat load_format = LoadFormat::from_files;
  std::uint64_t seed = 0;  // of dummy weights
  Quantization quantization = Quantization::automatic;
  PackWeights pack_weights = PackWeights::off;
  std::optional<Bytes> host_memory;
  bool adopt = false;  // the segments that an ended loader of this run left
  std::function<Bytes()> available = available_host_memory;  // the machine's, now
};

LoadOptions load_options(const LoaderOptions& options);

class Loader {
 public:
  // Fails if options, model or memory are wrong, before it takes memory.
  explicit Loader(const LoaderOptions& options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Handles the messages that have arrived, and waits a moment if none has. False once a peer sent
  // Stop. Throws if the weights could not be loaded.
  bool step();
  // Whether the segments can be left to a successor now: the weights are whole, and no pool is being made.
  bool can_leave() const;
  // From now on destruction leaves them. REQUIRES: can_leave().
  void leave();

 private:
  // Removes a name from shared memory on destruction.
  struct Unlinked {
    std::string name;
    bool left = false;
    ~Unlinked() {
      if (!left) {
        unlink_segment(name);
      }
    }
  };
  struct Beginning;
  static Beginning begin(const LoaderOptions& options);
  static Beginning make(const LoaderOptions& options);
  static Beginning adopt(const LoaderOptions& options);
  Loader(const LoaderOptions& options, Beginning beginning);

  std::optional<Received> receive();
  bool handle(const messages::Message& message);
  void greet(const messages::Hello& hello);
  void release_weights(std::int32_t resident_layers);
  void begin_restoring();
  void tell_restored(std::string why_not = {});
  void tell_weights(std::string why_not = {});
  void write_card() const;
  bool go_on_checking();

  LoaderOptions options_;
  ModelOnDisk model_;
  HostBudget budget_;
  Control control_;
  Unlinked control_name_;  // set once the name is ours: another loader may have it already
  std::unique_ptr<Channel> channel_;
  WeightLoading weights_;
  WeightCheck check_;
  std::optional<std::chrono::steady_clock::time_point> damaged_since_;  // and told
  PoolKeeper pools_;
  std::optional<std::chrono::steady_clock::time_point> restore_asked_;  // and not begun
  bool awaited_ = false;  // a planner waits for weights to be restored
};

}  // namespace poise
