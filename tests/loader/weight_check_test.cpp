#include "loader/weight_check.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/loader/loader_process.h"

namespace poise {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;

class WeightChecks : public LoaderProcess {
 protected:
  // As memory that errs, or another program of this user, does.
  void flip(std::uint64_t offset) const {
    const std::string path = "/dev/shm/" + segment("weights");
    ASSERT_EQ(chmod(path.c_str(), 0600), 0);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    char byte = 0;
    ASSERT_EQ(pread(file, &byte, 1, static_cast<off_t>(offset)), 1);
    byte = static_cast<char>(byte ^ 4);
    ASSERT_EQ(pwrite(file, &byte, 1, static_cast<off_t>(offset)), 1);
    close(file);
    chmod(path.c_str(), 0400);
  }
  messages::WeightsCheckedT check(Channel& planner, bool at_once) {
    messages::WeightsCheckT request;
    request.serial = ++serial_;
    request.at_once = at_once;
    const messages::MessageT answer = ask(planner, request);
    const auto* checked = answer.body.AsWeightsChecked();
    EXPECT_NE(checked, nullptr);
    EXPECT_EQ(checked->serial, serial_);
    return *checked;
  }
  std::unique_ptr<Channel> greeted_planner() {
    auto planner = connected_planner();
    ask(*planner, hello());
    return planner;
  }
  const WeightLayout layout_ = weight_layout(tiny_shape(), DType::float32);

 private:
  std::uint32_t serial_ = 0;
};

TEST_F(WeightChecks, AFlippedBitAnywhereInAnyTensorIsFound) {
  start();
  wait_for_seal();
  const auto planner = greeted_planner();
  std::vector<std::uint64_t> places;
  for (const WeightEntry& entry : layout_.outer.entries) {
    places.push_back(entry.offset);
    places.push_back(entry.offset + static_cast<std::uint64_t>(entry.bytes.n) - 1);
  }
  for (const WeightEntry& entry : layout_.layer.entries) {
    places.push_back(layout_.layer_offset({1}) + entry.offset);
    places.push_back(layout_.layer_offset({0}) + entry.offset +
                     static_cast<std::uint64_t>(entry.bytes.n) - 1);
  }
  bool at_once = false;
  for (const std::uint64_t place : places) {
    flip(place);
    const messages::WeightsCheckedT damaged = check(*planner, at_once);
    EXPECT_TRUE(damaged.damaged && !damaged.sound) << place;
    EXPECT_THAT(damaged.sentence, HasSubstr("have changed since they were loaded: tensor "));
    EXPECT_EQ(state(), LoaderState::draining) << "nothing attaches to damaged weights";
    flip(place);
    at_once = !at_once;
    EXPECT_TRUE(check(*planner, at_once).sound) << place;
  }
  EXPECT_FALSE(loader_->can_leave());
}

TEST_F(WeightChecks, LargeTensorsAreCheckedPartByPart) {
  TinyModel large{.shape = tiny_shape()};
  large.shape.hidden_size = large.shape.word_embed_proj_dim = 384;
  large.shape.num_attention_heads = large.shape.num_key_value_heads = 6;
  large.shape.ffn_dim = 1000;
  write_file(model_ / "config.json", config_json(large.shape, "float32"));
  LoaderOptions dummy = options();
  dummy.load_format = LoadFormat::dummy;
  start(dummy);
  wait_for_seal();
  const auto planner = greeted_planner();
  EXPECT_TRUE(check(*planner, false).sound);
  EXPECT_TRUE(check(*planner, true).sound);
  const WeightLayout layout = weight_layout(control()->shape, DType::float32);
  for (const WeightEntry& entry : layout.layer.entries) {
    if (entry.bytes.n > 1 << 20) {  // more than two leaves
      const std::uint64_t place =
          layout.layer_offset({1}) + entry.offset + static_cast<std::uint64_t>(entry.bytes.n) / 2;
      flip(place);
      EXPECT_TRUE(check(*planner, true).damaged);
      flip(place);
    }
  }
  EXPECT_TRUE(check(*planner, true).sound);
}

TEST_F(WeightChecks, ASuccessorKnowsTheWeightsByItsPredecessorsDigests) {
  start();
  wait_for_seal();
  leave();
  start(adopting());
  {
    const auto planner = greeted_planner();
    EXPECT_TRUE(check(*planner, true).sound);
  }
  leave();
  flip(layout_.layer_offset({1}));
  start(adopting());
  const auto planner = greeted_planner();
  EXPECT_TRUE(check(*planner, false).damaged);
}

// A model that could not be packed is there as it is, though the successor's options say to pack.
TEST_F(WeightChecks, ASuccessorKnowsWhetherTheWeightsArePacked) {
  for (const PackWeights packed : {PackWeights::off, PackWeights::automatic}) {
    LoaderOptions given = options();
    given.dtype = DType::bfloat16;
    given.pack_weights = packed;
    start(given);
    wait_for_seal();
    leave();
    given.pack_weights = PackWeights::automatic;
    given.adopt = true;
    start(given);
    EXPECT_TRUE(check(*greeted_planner(), true).sound);
    loader_.reset();
  }
}

TEST_F(WeightChecks, WithoutTheModelsFilesASuccessorSaysThatItCannotCheck) {
  start();
  wait_for_seal();
  leave();
  std::filesystem::remove(model_ / "config.json");
  start(adopting());
  const auto planner = greeted_planner();
  const messages::WeightsCheckedT checked = check(*planner, true);
  EXPECT_FALSE(checked.sound || checked.damaged);
  EXPECT_THAT(checked.sentence, HasSubstr("config.json"));
  EXPECT_EQ(state(), LoaderState::sealed);
}

TEST_F(WeightChecks, LayersThatADeviceHoldsAreLeftOut) {
  start();
  wait_for_seal();
  const auto planner = greeted_planner();
  ASSERT_TRUE(ask(*planner, released(1)).body.AsWeightsHeld()->done);
  EXPECT_TRUE(check(*planner, false).sound);
  flip(layout_.outer.entries[0].offset);
  EXPECT_TRUE(check(*planner, false).damaged);
}

}  // namespace
}  // namespace poise
