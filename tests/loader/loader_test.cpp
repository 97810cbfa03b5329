// The loader as its planner meets it: over a real socket and real shared memory, stepped by hand.

#include "loader/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>

#include "common/files/json.h"
#include "common/process.h"
#include "common/trouble.h"
#include "tests/loader/loader_process.h"
#include "tests/support/complaint.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;

TEST_F(LoaderProcess, WeightsAreSealedWithAFingerprintAndACard) {
  start();
  wait_for_seal();
  const Control header = control();
  EXPECT_TRUE(header->shape == tiny_shape());
  EXPECT_EQ(header->dtype, DType::float32);
  EXPECT_EQ(header->fingerprint_ready.load(), 1u);
  EXPECT_NE(std::ranges::count(header->fingerprint, 0), 32);
  const WeightLayout layout = weight_layout(tiny_shape(), DType::float32);
  EXPECT_EQ(header->layout_hash, layout.hash());
  EXPECT_EQ(header->weights_bytes, static_cast<std::uint64_t>(layout.total().n));

  const Segment weights = Segment::attach(segment("weights"), Access::read_only);
  EXPECT_EQ(weights.size(), layout.total());
  struct stat status {};
  ASSERT_EQ(stat(("/dev/shm/" + segment("weights")).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0400u);

  const auto card = nlohmann::json::parse(read_file(home_ / "loader.json"));
  EXPECT_EQ(card["run_id"], run_id_);
  EXPECT_EQ(card["dtype"], "float32");
  EXPECT_EQ(card["state"], "sealed");
  EXPECT_EQ(card["pid"], getpid());
}

TEST_F(LoaderProcess, NothingIsLeftWhenItEnds) {
  start();
  const auto planner = connected_planner();
  ask(*planner, hello());
  ASSERT_TRUE(ask_for_pool(*planner, claim(1 << 20, 10, 10)).granted);
  ASSERT_TRUE(exists(segment("blocks-1")));
  loader_.reset();
  for (const char* what : {"control", "weights", "blocks-1"}) {
    EXPECT_FALSE(exists(segment(what))) << what;
  }
  EXPECT_TRUE(std::filesystem::is_empty(home_));
}

// A loader whose supervisor was killed lives 10 s, in which many GiB may not be given back.
TEST_F(LoaderProcess, AllNamesAreRemovedBeforeAnyMemoryIsGivenBack) {
  start();
  const auto planner = connected_planner();
  ask(*planner, hello());
  ASSERT_TRUE(ask_for_pool(*planner, claim(1 << 20, 10, 10)).granted);
  const int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  ASSERT_GE(watch, 0);
  ASSERT_GE(inotify_add_watch(watch, "/dev/shm", IN_DELETE | IN_CLOSE), 0);
  loader_.reset();
  alignas(inotify_event) char buffer[1 << 16];
  std::string
      events;  // of this loader: d for a name that was removed, c for a segment that was closed
  for (ssize_t bytes = 0; (bytes = read(watch, buffer, sizeof buffer)) > 0;) {
    for (ssize_t at = 0; at < bytes;) {
      const auto* event = reinterpret_cast<const inotify_event*>(buffer + at);
      if (event->len > 0 && std::string(event->name).find(run_id_) != std::string::npos) {
        events += (event->mask & IN_DELETE) != 0 ? 'd' : 'c';
      }
      at += static_cast<ssize_t>(sizeof *event) + event->len;
    }
  }
  close(watch);
  EXPECT_EQ(events, "dddccc");
}

TEST_F(LoaderProcess, AHelloIsAnsweredAlsoWhileWeightsAreStillLoading) {
  TinyModel large{.shape = tiny_shape()};
  large.shape.hidden_size = 1024;
  large.shape.word_embed_proj_dim = 1024;
  large.shape.num_attention_heads = 16;
  large.shape.ffn_dim = 4096;
  large.shape.num_hidden_layers = 6;
  write_file(model_ / "config.json", config_json(large.shape, "float32"));
  LoaderOptions dummy = options();
  dummy.load_format = LoadFormat::dummy;
  start(dummy);
  const auto planner = connected_planner();
  const messages::MessageT answer = ask(*planner, hello());
  ASSERT_NE(answer.body.AsLoaderReply(), nullptr);
  EXPECT_EQ(answer.body.AsLoaderReply()->loader_epoch, 1u);
  loader_.reset();  // in the middle of it, or just after
  EXPECT_FALSE(exists(segment("weights")));
}

TEST_F(LoaderProcess, AHelloAfterTheSealSaysSo) {
  start();
  wait_for_seal();
  const auto planner = connected_planner();
  EXPECT_TRUE(ask(*planner, hello()).body.AsLoaderReply()->sealed);
}

TEST_F(LoaderProcess, APlannerOfAnotherModelIsTurnedAway) {
  start();
  wait_for_seal();
  const auto planner = connected_planner();
  messages::HelloT wrong = hello();
  wrong.fingerprint.assign(32, 7);
  try {
    ask(*planner, wrong);
    FAIL() << "another fingerprint was accepted";
  } catch (const Failure& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("another model"));
  }
  messages::HelloT right = hello();
  const Control header = control();
  right.fingerprint.assign(std::begin(header->fingerprint), std::end(header->fingerprint));
  const auto again = connected_planner();
  EXPECT_NE(ask(*again, right).body.AsLoaderReply(), nullptr);
}

TEST_F(LoaderProcess, APoolIsMadeMovedReplacedAndReleased) {
  start();
  const auto planner = connected_planner();
  ask(*planner, hello());
  const BlockSizes sizes = block_sizes(tiny_shape(), DType::float32, KvFormat::plain);
  const auto act = static_cast<std::uint64_t>(sizes.block(BlockKind::act).n);
  const auto kv = static_cast<std::uint64_t>(sizes.block(BlockKind::kv).n);
  ASSERT_EQ(act, 2048u);
  ASSERT_EQ(kv, 4096u);

  messages::PoolGrantT grant = ask_for_pool(*planner, claim(40'960, 4, 8));
  EXPECT_TRUE(grant.granted) << grant.sentence;
  EXPECT_EQ(grant.pool_epoch, 1u);
  EXPECT_EQ(control()->pool_epoch.load(), 1u);
  EXPECT_EQ(control()->pool.act_blocks, 4u);
  EXPECT_EQ(Segment::attach(segment("blocks-1"), Access::read_write).size(), Bytes{2 * 40'960});

  messages::PoolPartitionChangeT change;
  change.act_blocks = 8;
  change.kv_blocks = 6;
  grant = ask_for_pool(*planner, change);
  EXPECT_TRUE(grant.granted) << grant.sentence;
  EXPECT_EQ(grant.pool_epoch, 1u);
  EXPECT_EQ(control()->pool.act_blocks, 8u);
  change.kv_blocks = 7;
  grant = ask_for_pool(*planner, change);
  EXPECT_FALSE(grant.granted);
  EXPECT_THAT(grant.sentence, HasSubstr("8 ACT blocks of 2048 bytes and 7 KV blocks of 4096 bytes "
                                        "do not fit into a region of 40960 bytes"));
  EXPECT_EQ(control()->pool.kv_blocks, 6u);

  grant = ask_for_pool(*planner, claim(4096, 2, 0));
  EXPECT_TRUE(grant.granted);
  EXPECT_EQ(grant.pool_epoch, 2u);
  EXPECT_FALSE(exists(segment("blocks-1")));
  EXPECT_TRUE(exists(segment("blocks-2")));

  grant = ask_for_pool(*planner, messages::PoolReleaseT{});
  EXPECT_TRUE(grant.granted);
  EXPECT_EQ(grant.pool_epoch, 0u);
  EXPECT_EQ(control()->pool_epoch.load(), 0u);
  EXPECT_FALSE(ask_for_pool(*planner, change).granted);
  loader_.reset();
  EXPECT_FALSE(exists(segment("blocks-2")));  // until then its memory was kept for the next one
}

TEST_F(LoaderProcess, APoolThatCannotBeIsRefusedWithAReason) {
  LoaderOptions capped = options();
  capped.host_memory = kMiB * 64;
  start(capped);
  const auto planner = connected_planner();
  ask(*planner, hello());
  const auto sentence = [&](const messages::PoolClaimT& wanted) {
    const messages::PoolGrantT grant = ask_for_pool(*planner, wanted);
    EXPECT_FALSE(grant.granted);
    return grant.sentence;
  };
  EXPECT_THAT(sentence(claim(0, 0, 0)), HasSubstr("no multiple of 4096"));
  EXPECT_THAT(sentence(claim(4097, 1, 0)), HasSubstr("no multiple of 4096"));
  EXPECT_THAT(sentence(claim(4096, 1, 1)), HasSubstr("do not fit into a region"));
  EXPECT_THAT(sentence(claim(4096, ~0u, ~0u)), HasSubstr("do not fit into a region"));
  EXPECT_THAT(sentence(claim(~0ull << 12, 1, 1)), HasSubstr("more than any machine has"));
  EXPECT_THAT(sentence(claim(1ull << 40, 1, 1)), HasSubstr("--host-memory allows 64.0 MiB"));
  EXPECT_TRUE(ask_for_pool(*planner, claim(1 << 20, 1, 1)).granted);
}

TEST_F(LoaderProcess, APoolOfQuantisedBlocksHoldsMoreOfThem) {
  start();
  const auto planner = connected_planner();
  ask(*planner, hello());
  const std::int64_t plain = block_sizes(tiny_shape(), DType::float32, KvFormat::plain).kv_row.n;
  const std::int64_t codes = block_sizes(tiny_shape(), DType::float32, KvFormat::int4).kv_row.n;
  ASSERT_LT(codes, plain);
  messages::PoolClaimT wanted =
      claim(1 << 16, 0, static_cast<std::uint32_t>((1 << 16) / (16 * codes)));
  EXPECT_FALSE(ask_for_pool(*planner, wanted).granted) << "plain ones do not fit";
  wanted.kv_format = messages::KvFormat::Int4;
  const messages::PoolGrantT grant = ask_for_pool(*planner, wanted);
  EXPECT_TRUE(grant.granted) << grant.sentence;
  EXPECT_EQ(grant.kv_format, messages::KvFormat::Int4);
  EXPECT_EQ(control()->kv_format, KvFormat::int4);
  messages::PoolPartitionChangeT change;
  change.kv_blocks = wanted.kv_blocks - 1;
  EXPECT_EQ(ask_for_pool(*planner, change).kv_format, messages::KvFormat::Int4);
  wanted.kv_format = static_cast<messages::KvFormat>(7);
  EXPECT_THAT(ask_for_pool(*planner, wanted).sentence, HasSubstr("format 7"));
}

TEST_F(LoaderProcess, APlannerThatComesBackIsServedAndItsClaimReplacesTheOldOne) {
  start();
  {
    const auto first = connected_planner();
    ask(*first, hello());
    ASSERT_EQ(ask_for_pool(*first, claim(4096, 1, 0)).pool_epoch, 1u);
  }
  const auto second = connected_planner();
  ask(*second, hello());
  EXPECT_TRUE(exists(segment("blocks-1")));  // until somebody claims
  EXPECT_EQ(ask_for_pool(*second, claim(4096, 1, 0)).pool_epoch, 2u);
  EXPECT_FALSE(exists(segment("blocks-1")));
}

// Tells whether two names meant the same memory.
std::uint64_t inode_of(const std::string& name) {
  struct stat status {};
  return stat(("/dev/shm/" + name).c_str(), &status) == 0 ? status.st_ino : 0;
}

TEST_F(LoaderProcess, AReleasedPoolsMemoryGoesToTheNextWhateverItsSize) {
  start();
  const auto planner = connected_planner();
  wait_for_seal();
  ask(*planner, hello());
  std::uint64_t epoch = 0;
  std::uint64_t inode = 0;
  for (const std::uint64_t region : {1u << 20, 3u << 20, 3u << 20, 1u << 19}) {
    const messages::PoolGrantT grant = whole_pool(*planner, claim(region, 2, 2));
    EXPECT_EQ(grant.pool_epoch, ++epoch) << "an executor would take it for the one it has mapped";
    EXPECT_FALSE(exists(segment(fmt::format("blocks-{}", epoch - 1))));
    const std::string name = segment(fmt::format("blocks-{}", epoch));
    struct stat status {};
    ASSERT_EQ(stat(("/dev/shm/" + name).c_str(), &status), 0);
    EXPECT_EQ(status.st_size, static_cast<std::int64_t>(region * 2));
    EXPECT_EQ(status.st_blocks * 512, status.st_size);
    inode = epoch == 1 ? status.st_ino : inode;
    EXPECT_EQ(status.st_ino, inode) << "pool " << epoch;
    EXPECT_EQ(control()->spare_pool_bytes.load(), 0u);
    EXPECT_EQ(control()->pool_standing.load(), region);
    const Segment pool = Segment::attach(name, Access::read_write);  // as an executor that ends now
    pool.data()[region] = std::byte{7};
    if (epoch % 2 == 1) {
      ask_for_pool(*planner, messages::PoolReleaseT{});
      EXPECT_EQ(control()->spare_pool_bytes.load(), 0u) << "it is in use";
    }
  }
  ask_for_pool(*planner, messages::PoolReleaseT{});
  EXPECT_EQ(control()->spare_pool_bytes.load(), 1u << 20);
  EXPECT_TRUE(exists(segment(fmt::format("blocks-{}", epoch))));
  loader_.reset();
  EXPECT_FALSE(exists(segment(fmt::format("blocks-{}", epoch))));
}

TEST_F(LoaderProcess, AnExecutorThatHasAPoolMappedKeepsItForItself) {
  start();
  const auto planner = connected_planner();
  wait_for_seal();
  ask(*planner, hello());
  whole_pool(*planner, claim(1 << 20, 2, 2));
  const std::uint64_t first = inode_of(segment("blocks-1"));
  const Segment executors = Segment::attach(segment("blocks-1"), Access::read_write);
  ask_for_pool(*planner, messages::PoolReleaseT{});
  ASSERT_TRUE(ask_for_pool(*planner, claim(1 << 20, 2, 2)).granted);
  EXPECT_NE(inode_of(segment("blocks-2")), first);
  EXPECT_FALSE(exists(segment("blocks-1")));
}

TEST_F(LoaderProcess, ASparePoolsMemoryCountsForTheNextAndGivesWayToWeights) {
  Bytes room = kMiB * 64;
  LoaderOptions watched = options();
  watched.available = [&] { return room; };
  start(watched);
  const auto planner = connected_planner();
  wait_for_seal();
  ask(*planner, hello());
  ask(*planner, released(1));
  whole_pool(*planner, claim(4 << 20, 2, 2));
  ask_for_pool(*planner, messages::PoolReleaseT{});
  room = kMiB * 2;  // the pool has taken the rest
  whole_pool(*planner, claim(5 << 20, 2, 2));
  EXPECT_THAT(ask_for_pool(*planner, claim(7 << 20, 2, 2)).sentence,
              HasSubstr("into the 12.0 MiB"));
  room = {};
  ask_for_pool(*planner, messages::PoolReleaseT{});
  ASSERT_TRUE(send(*planner, messages::WeightsRestoreT{}));
  step_until([&] { return control()->spare_pool_bytes.load() == 0; });
  room = kMiB * 64;
  step_until([&] { return control()->released_layers.load() == 0; });
  EXPECT_FALSE(exists(segment("blocks-2")));
}

// A device has taken a layer: its host memory goes to blocks, and comes back with the same bytes.
TEST_F(LoaderProcess, LayersThatADeviceHoldsGiveTheirMemoryBackAndAreRestored) {
  const WeightLayout layout = weight_layout(tiny_shape(), DType::float32);
  LoaderOptions capped = options();
  capped.host_memory = layout.total() + layout.layer.bytes / 2;
  start(capped);
  const auto planner = connected_planner();
  wait_for_seal();
  ask(*planner, hello());
  const auto weights_of = [&](messages::MessageT message) {
    const auto* held = message.body.AsWeightsHeld();
    return held != nullptr ? *held : messages::WeightsHeldT{};
  };
  const auto bytes = [&] {
    const Segment weights = Segment::attach(segment("weights"), Access::read_only);
    return std::vector<std::byte>(weights.data(), weights.data() + weights.size().n);
  };
  const auto reserved = [&] {
    struct stat status {};
    EXPECT_EQ(stat(("/dev/shm/" + segment("weights")).c_str(), &status), 0);
    return status.st_blocks * 512;
  };
  const auto before = bytes();
  const std::uint64_t region = static_cast<std::uint64_t>(layout.layer.bytes.n) / 2;
  EXPECT_FALSE(ask_for_pool(*planner, claim(region, 1, 1)).granted);

  messages::WeightsReleaseT release;
  release.resident_layers = 3;
  EXPECT_THAT(weights_of(ask(*planner, release)).sentence, HasSubstr("of a model of 2"));
  release.resident_layers = 1;
  messages::WeightsHeldT held = weights_of(ask(*planner, release));
  EXPECT_TRUE(held.done) << held.sentence;
  EXPECT_EQ(held.released_layers, 1);
  EXPECT_EQ(control()->released_layers.load(), 1u);
  EXPECT_EQ(reserved(), (layout.total() - layout.layer.bytes).n);
  EXPECT_TRUE(weights_of(ask(*planner, release)).done) << "asked once more";
  release.resident_layers = 2;
  EXPECT_FALSE(weights_of(ask(*planner, release)).done);
  EXPECT_TRUE(ask_for_pool(*planner, claim(region, 1, 1)).granted);

  held = weights_of(ask(*planner, messages::WeightsRestoreT{}));
  EXPECT_FALSE(held.done);
  EXPECT_THAT(held.sentence, HasSubstr("release the pool first"));
  ask_for_pool(*planner, messages::PoolReleaseT{});
  held = weights_of(ask(*planner, messages::WeightsRestoreT{}));
  EXPECT_TRUE(held.done) << held.sentence;
  EXPECT_EQ(held.released_layers, 0);
  EXPECT_EQ(control()->released_layers.load(), 0u);
  EXPECT_EQ(state(), LoaderState::sealed);
  EXPECT_EQ(reserved(), layout.total().n);
  EXPECT_TRUE(bytes() == before);
}

TEST_F(LoaderProcess, WeightsThatChangedOnDiskAreNotTakenForThoseReleased) {
  start();
  const auto planner = connected_planner();
  wait_for_seal();
  ask(*planner, hello());
  const messages::WeightsReleaseT release = released(2);
  ask(*planner, release);
  std::fstream file(model_ / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end);
  file.put('\x5a');
  file.close();
  try {
    ask(*planner, messages::WeightsRestoreT{});
    ADD_FAILURE() << "other bytes were taken";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::foreign);
    EXPECT_THAT(failure.what(), HasSubstr("the model's files changed"));
  }
}

TEST_F(LoaderProcess, FilesOfTheSameBytesAreReadAgainAndShorterOnesAreForeign) {
  start();
  const auto planner = connected_planner();
  wait_for_seal();
  ask(*planner, hello());
  const messages::WeightsReleaseT release = released(2);
  ask(*planner, release);
  const std::filesystem::path file = model_ / "model.safetensors";
  std::filesystem::last_write_time(file, std::filesystem::file_time_type::clock::now());
  const messages::MessageT answer = ask(*planner, messages::WeightsRestoreT{});
  ASSERT_NE(answer.body.AsWeightsHeld(), nullptr);
  EXPECT_TRUE(answer.body.AsWeightsHeld()->done) << answer.body.AsWeightsHeld()->sentence;

  ask(*planner, release);
  std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
  try {
    ask(*planner, messages::WeightsRestoreT{});
    ADD_FAILURE() << "half a file was enough";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::foreign)
        << "a run under way cannot end as one that never began";
    EXPECT_THAT(failure.what(), HasSubstr("was it changed meanwhile"));
  }
}

// A planner that is gone had claimed a large pool: restoring waits for what is left of that.
TEST_F(LoaderProcess, WeightsThatAreAskedForWhileAPoolIsMadeComeBackBehindIt) {
  start();
  const auto planner = connected_planner();
  wait_for_seal();
  ask(*planner, hello());
  const messages::WeightsReleaseT release = released(1);
  ask(*planner, release);
  ASSERT_TRUE(send(*planner, claim(64 << 20, 1, 1)));
  ASSERT_TRUE(send(*planner, messages::WeightsRestoreT{}));
  std::vector<messages::Body> answers;
  step_until([&] {
    if (const auto answer = planner->receive({0.001})) {
      answers.push_back((*answer)->body_type());
    }
    return answers.size() == 2;
  });
  EXPECT_EQ(answers, (std::vector{messages::Body::PoolGrant, messages::Body::WeightsHeld}));
  EXPECT_EQ(control()->released_layers.load(), 0u);
}

// An executor that is about to end holds a pool's memory a little longer than the loader.
TEST_F(LoaderProcess, WeightsComeBackOnceThereIsRoomForThemAndAreToldToWhoAskedAlone) {
  Bytes room = kGiB;
  LoaderOptions watched = options();
  watched.available = [&] { return room; };
  start(watched);
  auto planner = connected_planner();
  wait_for_seal();
  ask(*planner, hello());
  const auto is_silent = [&](int steps) {
    bool silent = true;
    for (int step = 0; step < steps; ++step) {
      loader_->step();
      silent = silent && !planner->receive({0});
    }
    return silent;
  };
  ask(*planner, released(1));
  room = {};
  ASSERT_TRUE(send(*planner, messages::WeightsRestoreT{}));
  EXPECT_TRUE(is_silent(10));
  room = kGiB;
  std::optional<Received> answer;
  step_until([&] { return (answer = planner->receive({0.001})).has_value(); });
  EXPECT_TRUE((*answer)->body_as_WeightsHeld()->done());
  EXPECT_EQ(control()->released_layers.load(), 0u);

  ask(*planner, released(1));
  room = {};
  ASSERT_TRUE(send(*planner, messages::WeightsRestoreT{}));
  EXPECT_TRUE(is_silent(10));
  planner = connected_planner();  // another one
  EXPECT_NE(ask(*planner, hello()).body.AsLoaderReply(), nullptr);
  room = kGiB;
  step_until([&] { return control()->released_layers.load() == 0; });
  EXPECT_TRUE(is_silent(10));
}

TEST_F(LoaderProcess, ASecondOneOfTheSameRunLeavesTheFirstOnesMemoryAlone) {
  start();
  wait_for_seal();
  LoaderOptions second = options();
  second.home = directory_.path() / "second";
  std::filesystem::create_directory(second.home);
  chmod(second.home.c_str(), 0700);
  EXPECT_THAT(complaint([&] { Loader loader(second); }), HasSubstr("File exists"));
  EXPECT_TRUE(exists(segment("control")));
  EXPECT_TRUE(exists(segment("weights")));
}

// A kept loader serves runs of other caps than the one that started it.
TEST_F(LoaderProcess, TheCapIsThatOfTheClaimingRun) {
  const WeightLayout layout = weight_layout(tiny_shape(), DType::float32);
  LoaderOptions capped = options();
  capped.host_memory = layout.total() + kKiB * 64;
  start(capped);
  const auto planner = connected_planner();
  wait_for_seal();
  ask(*planner, hello());
  messages::PoolClaimT wanted = claim(1 << 20, 1, 1);
  EXPECT_FALSE(ask_for_pool(*planner, wanted).granted);
  wanted.host_memory = static_cast<std::uint64_t>((layout.total() + kMiB * 2).n);
  EXPECT_TRUE(ask_for_pool(*planner, wanted).granted);
  wanted.host_memory -= 1;
  EXPECT_THAT(ask_for_pool(*planner, wanted).sentence, HasSubstr("--host-memory allows"));
  wanted.host_memory = INT64_MAX;
  EXPECT_TRUE(ask_for_pool(*planner, wanted).granted);
  wanted.region_bytes = 1ull << 40;
  EXPECT_THAT(ask_for_pool(*planner, wanted).sentence, HasSubstr("this machine has"));
}

TEST_F(LoaderProcess, AClaimWhosePlannerIsGoneLeavesNoPool) {
  start();
  wait_for_seal();
  {
    const auto first = connected_planner();
    ask(*first, hello());
    ASSERT_TRUE(send(*first, claim(32 << 20, 1, 1)));
  }
  const auto second = connected_planner();
  ask(*second, hello());
  const messages::PoolGrantT grant = ask_for_pool(*second, claim(4096, 1, 0));
  EXPECT_TRUE(grant.granted);
  EXPECT_EQ(grant.region_bytes, 4096u);
  std::vector<std::string> pools;
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    if (file.path().filename().string().starts_with(segment("blocks-"))) {
      pools.push_back(file.path().filename().string());
    }
  }
  EXPECT_EQ(pools.size(), 1u);
}

TEST_F(LoaderProcess, StopEndsIt) {
  start();
  const auto planner = connected_planner();
  ask(*planner, hello());
  ASSERT_TRUE(send(*planner, messages::StopT{.reason = "done"}));
  step_until([&] { return !running_; });
  EXPECT_FALSE(running_);
}

TEST_F(LoaderProcess, MessagesThatAreNotForItAreSurvived) {
  start();
  const auto planner = connected_planner();
  ask(*planner, hello());
  ASSERT_TRUE(send(*planner, messages::AckT{.seq = 3}));
  EXPECT_TRUE(ask_for_pool(*planner, claim(4096, 1, 0)).granted);
}

TEST_F(LoaderProcess, ProgressWordsMoveWithTheWork) {
  start();
  const Control header = control();
  wait_for_seal();
  const auto& word = header->progress[static_cast<int>(Process::loader)].steps;
  EXPECT_GT(word.load(), 0u);
  EXPECT_GT(header->loaded_bytes.load(), 0u);
  const std::uint64_t before = word.load();
  running_ = loader_->step();  // nothing to do: no progress is claimed
  EXPECT_EQ(word.load(), before);
}

TEST_F(LoaderProcess, OptionsThatCannotBeAreRefusedBeforeMemoryIsTaken) {
  const auto said = [&](const std::function<void(LoaderOptions&)>& change) {
    LoaderOptions changed = options();
    change(changed);
    return complaint([&] { Loader{changed}; });
  };
  EXPECT_THAT(said([](auto& o) { o.run_id = "../x"; }), HasSubstr("--run-id must be"));
  EXPECT_THAT(said([](auto& o) { o.run_id = ""; }), HasSubstr("--run-id must be"));
  EXPECT_THAT(said([](auto& o) { o.run_id = std::string(40, 'a'); }), HasSubstr("--run-id must"));
  EXPECT_THAT(said([](auto& o) { o.home = "/nowhere"; }), HasSubstr("is no directory"));
  EXPECT_THAT(said([](auto& o) { o.host_memory = Bytes{0}; }), HasSubstr("more than 0"));
  EXPECT_THAT(said([](auto& o) { o.host_memory = Bytes{1000}; }),
              HasSubstr("--host-memory allows 0.0 MiB"));
  EXPECT_THAT(said([](auto& o) { o.model = "/nowhere"; }), HasSubstr("is not there"));
  chmod(home_.c_str(), 0755);
  EXPECT_THAT(said([](auto&) {}), HasSubstr("chmod 700"));
  EXPECT_FALSE(exists(segment("control")));
}

TEST_F(LoaderProcess, AModelLargerThanTheMachineIsRefusedInNumbers) {
  ModelShape shape = tiny_shape();
  shape.hidden_size = 12288;
  shape.word_embed_proj_dim = 12288;
  shape.num_attention_heads = 96;
  shape.ffn_dim = 49152;
  shape.num_hidden_layers = 1000;
  write_file(model_ / "config.json", config_json(shape, "float16"));
  LoaderOptions dummy = options();
  dummy.load_format = LoadFormat::dummy;
  EXPECT_THAT(complaint([&] { Loader{dummy}; }), HasSubstr("GiB of host memory, but this machine"));
}

TEST_F(LoaderProcess, WeightsThatTurnOutToBeWrongEndIt) {
  std::string file = read_file(model_ / "model.safetensors");
  start();
  std::filesystem::resize_file(model_ / "model.safetensors", file.size() / 2);
  const std::string said = complaint([&] { wait_for_seal(); });
  if (said != "nothing was refused") {  // it may have been faster than the cut
    EXPECT_THAT(said, HasSubstr("model.safetensors"));
  }
  loader_.reset();
  EXPECT_FALSE(exists(segment("weights")));
}

TEST_F(LoaderProcess, DummyWeightsNeedNoFilesAndFollowTheSeed) {
  std::filesystem::remove(model_ / "model.safetensors");
  const auto fingerprint = [&](std::uint64_t seed) {
    run_id_ = fresh_run_id();
    LoaderOptions dummy = options();
    dummy.load_format = LoadFormat::dummy;
    dummy.seed = seed;
    start(dummy);
    wait_for_seal();
    const Digest digest = std::to_array(control()->fingerprint);
    loader_.reset();
    return to_hex(digest);
  };
  const std::string first = fingerprint(1);
  EXPECT_EQ(fingerprint(1), first);
  EXPECT_NE(fingerprint(2), first);
}

}  // namespace
}  // namespace poise
