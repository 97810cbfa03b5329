#include "gpu_executor/order_check/order_check.h"

#include <gmock/gmock.h>

#include <functional>
#include <limits>
#include <string>

#include "common/trouble.h"
#include "tests/gpu_executor/pipeline_run.h"

namespace poise::test {
namespace {

using messages::AttentionEntry;
using messages::BlockRun;
using messages::IterationT;
using messages::Kind;
using messages::LayerOrderT;
using messages::MiniBatchT;
using messages::Place;
using messages::Sequence;
using messages::SlotRange;
using messages::Store;
using messages::WeightFetch;
using messages::Where;
using testing::HasSubstr;

constexpr std::uint32_t kCredits = 8;

// A decode step in two mini-batches of two sequences each, behind a prefill that was accepted, with
// KV and ACT blocks of which some are not full.
class OrderCheckTest : public testing::Test {
 protected:
  OrderCheckTest() : shape_(tiny_shape()), layout_(weight_layout(shape_, DType::float32)) {
    plan_ = {.sequences = random_sequences(shape_, {45, 50, 55, 60}, 1), .kind = mixed};
    plan_.prompt = 40;
    SmallPlanner planner(plan_, layout_, limits_, pool_.partition);
    prefill_ = planner.next();
    decode_ = planner.next();
    check_.emplace(shape_, layout_, limits_, kCredits);
    accept_all(prefill_);
  }

  void accept_all(const Planned& planned) {
    accept(planned.tables);
    for (const LayerOrderT& order : planned.orders) {
      accept(order);
      check_->done();
    }
  }
  StoreDependencies accept(const IterationT& tables) {
    return check_->accept(*Packed<messages::Iteration>(tables), pool_);
  }
  void accept(const LayerOrderT& order) { check_->accept(*Packed<messages::LayerOrder>(order)); }

  MiniBatchT& batch() { return *decode_.tables.mini_batches[0]; }

  // The sentence something was refused with; empty where it was not.
  template <typename Act>
  static std::string refusal(Act&& act) {
    try {
      act();
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.code(), Exit::cannot_start) << "the executor must live on";
      return failure.what();
    }
    return {};
  }
  // … and behind it the right order is accepted as if nothing had been.
  void expect_refused(const std::string& sentence) {
    EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr(sentence));
    EXPECT_TRUE(check_->between_iterations());
    Planned right = again();
    accept(right.tables);
  }
  void expect_order_refused(const LayerOrderT& order, const std::string& sentence) {
    EXPECT_THAT(refusal([&] { accept(order); }), HasSubstr(sentence));
  }
  // The decode step as it was planned.
  Planned again() {
    SmallPlanner planner(plan_, layout_, limits_, pool_.partition);
    planner.next();
    return planner.next();
  }

  template <typename T>
  static std::size_t index_where(const std::vector<T>& of, std::function<bool(const T&)> is) {
    const auto found = std::ranges::find_if(of, is);
    EXPECT_NE(found, of.end());
    return static_cast<std::size_t>(found - of.begin());
  }
  AttentionEntry& entry(Where where) {
    return batch().entries[index_where<AttentionEntry>(
        batch().entries, [&](const auto& one) { return one.where() == where; })];
  }
  BlockRun& load(Kind kind) {
    return batch().loads[index_where<BlockRun>(
        batch().loads, [&](const auto& one) { return one.kind() == kind; })];
  }

  ModelShape shape_;
  WeightLayout layout_;
  DeviceLimits limits_ = Setting{}.limits;
  PoolNow pool_{.epoch = 1,
                .partition = {.region_bytes = 1 << 20, .act_blocks = 40, .kv_blocks = 50}};
  Plan plan_;
  Planned prefill_, decode_;
  std::optional<OrderCheck> check_;
};

TEST_F(OrderCheckTest, ValidOrdersAreAcceptedToTheEnd) {
  accept_all(decode_);
  EXPECT_TRUE(check_->between_iterations());
}

// ---- activations

class AbsorptionOrderCheckTest : public OrderCheckTest {
 protected:
  AbsorptionOrderCheckTest() {
    limits_.absorption = true;
    plan_.absorbed = [](std::uint32_t, std::uint32_t) { return true; };
    check_.emplace(shape_, layout_, limits_, kCredits);
    SmallPlanner planner(plan_, layout_, limits_, pool_.partition);
    prefill_ = planner.next();
    decode_ = planner.next();
    accept_all(prefill_);
  }
};

TEST_F(AbsorptionOrderCheckTest, ValidOrdersAreAcceptedToTheEnd) {
  ASSERT_TRUE(batch().regenerate.empty());
  ASSERT_EQ(entry(Where::Activation).kind(), Kind::Act);
  accept_all(decode_);
  EXPECT_TRUE(check_->between_iterations());
}

TEST_F(AbsorptionOrderCheckTest, AttentionOverActivationsThatWasNotConfiguredIsRefused) {
  limits_.absorption = false;
  check_.emplace(shape_, layout_, limits_, kCredits);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("did not ask for it"));
}

TEST_F(AbsorptionOrderCheckTest, AnEntryThatIsNoActBlockIsRefused) {
  AttentionEntry& one = entry(Where::Activation);
  one = AttentionEntry(one.where(), Kind::Kv, one.place(), 0, one.slot(), one.block());
  expect_refused("is of kind Kv, and to be read as Activation");
}

TEST_F(AbsorptionOrderCheckTest, OnlyASingleNewRowAttendsActivations) {
  MiniBatchT& prompts = *prefill_.tables.mini_batches[0];
  AttentionEntry& one = prompts.entries[index_where<AttentionEntry>(
      prompts.entries, [](const auto& each) { return each.where() == Where::RegeneratedKv; })];
  one = AttentionEntry(Where::Activation, one.kind(), one.place(), 0, one.slot(), one.block());
  check_.emplace(shape_, layout_, limits_, kCredits);
  EXPECT_THAT(refusal([&] { accept(prefill_.tables); }),
              HasSubstr("40 new rows attend activations, which only one does"));
}

TEST_F(AbsorptionOrderCheckTest, ActivationsThatNothingLoadsAreRefused) {
  const BlockRun run = load(Kind::Act);
  std::erase_if(batch().loads, [&](const BlockRun& one) {
    return one.kind() == Kind::Act && one.first_slot() == run.first_slot();
  });
  expect_refused("are read that nothing loads");
}

TEST_F(AbsorptionOrderCheckTest, ActivationsOfAnotherBlockAreRefused) {
  AttentionEntry& one = entry(Where::Activation);
  one = AttentionEntry(one.where(), one.kind(), one.place(), 0, one.slot(), one.block() + 1);
  expect_refused("Act block");
}

TEST_F(AbsorptionOrderCheckTest, TheSlotOfAnotherSequenceIsRefused) {
  std::vector<AttentionEntry*> last;  // whose blocks take new rows
  for (const Sequence& sequence : batch().sequences) {
    AttentionEntry& one =
        batch().entries[sequence.first_entry() + sequence.context() / kBlockTokens];
    if (one.where() == Where::Activation) {
      last.push_back(&one);
    }
  }
  ASSERT_GT(last.size(), 0u);
  batch().entries[index_where<AttentionEntry>(batch().entries, [&](const auto& one) {
    return one.where() == Where::Activation && one.slot() != last[0]->slot();
  })] = *last[0];
  EXPECT_NE(refusal([&] { accept(decode_.tables); }), "");
}

// ---- host cores

class HostOrderCheckTest : public OrderCheckTest {
 protected:
  HostOrderCheckTest() {
    limits_.host_attention = true;
    plan_.on_host = [](std::uint32_t request) { return request >= 2; };
    check_.emplace(shape_, layout_, limits_, kCredits);
    SmallPlanner planner(plan_, layout_, limits_, pool_.partition);
    prefill_ = planner.next();
    decode_ = planner.next();
    accept_all(prefill_);
  }
  MiniBatchT& host_batch() { return *decode_.tables.mini_batches.back(); }
  // The tables are refused, and may be so again.
  void expect_wrong(const std::string& sentence) {
    EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr(sentence));
    EXPECT_TRUE(check_->between_iterations());
  }
};

TEST_F(HostOrderCheckTest, ValidOrdersAreAcceptedToTheEnd) {
  ASSERT_EQ(host_batch().entries[0].where(), Where::HostInPlace);
  accept_all(decode_);
  EXPECT_TRUE(check_->between_iterations());
}

TEST_F(HostOrderCheckTest, AttentionOnHostCoresThatWasNotConfiguredIsRefused) {
  limits_.host_attention = false;
  check_.emplace(shape_, layout_, limits_, kCredits);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("did not ask for"));
}

TEST_F(HostOrderCheckTest, AnEntryThatIsNoKvBlockOfTheHostIsRefused) {
  const AttentionEntry right = host_batch().entries[1];
  for (const AttentionEntry& wrong :
       {AttentionEntry(Where::LoadedKv, Kind::Kv, Place::Host, 0, 0, right.block()),
        AttentionEntry(Where::HostInPlace, Kind::Act, Place::Host, 0, 0, right.block()),
        AttentionEntry(Where::HostInPlace, Kind::Kv, Place::Gpu, 0, 0, right.block()),
        AttentionEntry(Where::HostInPlace, Kind::Kv, Place::Nowhere, 0, 0, right.block())}) {
    host_batch().entries[1] = wrong;
    expect_wrong("entry 1 is no Kv block of the host");
    host_batch().entries[1] = right;
  }
  batch().entries[1] = right;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("to be computed on host cores"));
}

TEST_F(HostOrderCheckTest, DroppedBlocksAreThoseThatNoLayerSees) {
  shape_.sliding_window = 20;
  const auto dropped = AttentionEntry(Where::HostInPlace, Kind::Kv, Place::Dropped, 0, 0, 0);
  host_batch().entries[host_batch().sequences[0].first_entry()] = dropped;
  expect_wrong("block 0 is dropped, but its rows see it");
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    shape_.set_window({layer});
  }
  check_.emplace(shape_, layout_, limits_, kCredits);
  accept_all(prefill_);
  accept(decode_.tables);
}

TEST_F(HostOrderCheckTest, BlocksBeyondThePoolOrOfTwoSequencesAreRefused) {
  auto& entries = host_batch().entries;
  const AttentionEntry right = entries[1];
  entries[1] = AttentionEntry(Where::HostInPlace, Kind::Kv, Place::Host, 0, 0, 50);
  expect_wrong("entry 1 is Kv block 50 of 50");
  entries[1] = AttentionEntry(Where::HostInPlace, Kind::Kv, Place::Host, 0, 0, entries[0].block());
  expect_wrong("again");
  entries[1] = right;
  const Sequence second = host_batch().sequences[1];
  host_batch().sequences[1] =
      Sequence(second.request(), second.context(), second.new_tokens(), second.first_row(), 0);
  expect_wrong("its entry is another's too");
}

TEST_F(HostOrderCheckTest, LoadsBesideItAreRefused) {
  host_batch().loads.emplace_back(Kind::Kv, Place::Host, 16, 1, 0, 0);
  expect_wrong("it loads or regenerates blocks");
}

TEST_F(HostOrderCheckTest, NewRowsNeedTheirStores) {
  const Store right = host_batch().stores[0];
  host_batch().stores[0] = Store(Kind::Act, Place::Host, right.token(), 1, right.row(), 3);
  expect_wrong("host cores write Kv blocks of their own alone");
  host_batch().stores.clear();
  expect_wrong("of the host, which nothing stores");
}

TEST_F(HostOrderCheckTest, RowsThatALaterMiniBatchStoresAreNotReadInPlace) {
  const AttentionEntry read = host_batch().entries[0];
  MiniBatchT& before = batch();
  // The device's mini-batch reads in full what the host's one stores only now.
  const Store stored = host_batch().stores[0];
  const auto load = index_where<BlockRun>(
      before.loads, [](const auto& one) { return one.kind() == Kind::Kv && one.count() == 1; });
  const BlockRun run = before.loads[load];
  before.loads[load] = BlockRun(Kind::Kv, Place::Host, 16, 1, stored.block(), run.first_slot());
  for (AttentionEntry& entry : before.entries) {
    if (entry.where() == Where::LoadedKv && entry.slot() == run.first_slot()) {
      entry =
          AttentionEntry(Where::LoadedKv, Kind::Kv, Place::Host, 0, entry.slot(), stored.block());
    }
  }
  EXPECT_EQ(read.where(), Where::HostInPlace);
  EXPECT_NE(refusal([&] { accept(decode_.tables); }), "");
}

// Host cores may begin before the device has stored anything of the layer.
TEST_F(HostOrderCheckTest, RowsThatTheDeviceStoresMeanwhileAreNotReadInPlace) {
  plan_.kind = all_kv;
  check_.emplace(shape_, layout_, limits_, kCredits);
  SmallPlanner planner(plan_, layout_, limits_, pool_.partition);
  prefill_ = planner.next();
  decode_ = planner.next();
  accept_all(prefill_);
  const std::uint32_t block = batch().stores[0].block();
  host_batch().entries[0] = AttentionEntry(Where::HostInPlace, Kind::Kv, Place::Host, 0, 0, block);
  expect_wrong("that the device stores for mini-batch 0 in the same iteration");
}

TEST_F(HostOrderCheckTest, AMiniBatchOfTheDeviceBehindOneOfHostCoresIsRefused) {
  accept(decode_.tables);
  LayerOrderT order = decode_.orders[0];
  std::ranges::reverse(order.mini_batches);
  expect_order_refused(order, "these come last");
}

// ---- iterations

TEST_F(OrderCheckTest, AnIterationThatIsNotLaterIsRefused) {
  decode_.tables.iteration = 1;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("comes after iteration 1"));
}

TEST_F(OrderCheckTest, BlocksOfAnotherPoolEpochAreRefused) {
  decode_.tables.pool_epoch = 2;
  expect_refused("pool epoch 2, the pool's epoch is 1");
}

TEST_F(OrderCheckTest, BlocksWithoutAPoolAreRefused) {
  pool_.epoch = 0;
  decode_.tables.pool_epoch = 0;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("pool epoch 0"));
}

TEST_F(OrderCheckTest, AnIterationWithoutMiniBatchesIsRefused) {
  decode_.tables.mini_batches.clear();
  expect_refused("no mini-batches");
}

TEST_F(OrderCheckTest, MiniBatchesWithWrongIdsAreRefused) {
  batch().id = 1;
  expect_refused("an id is its place");
}

TEST_F(OrderCheckTest, MoreRowsThanTheIterationMayHaveAreRefused) {
  limits_.max_rows = 3;
  check_.emplace(shape_, layout_, limits_, kCredits);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("3 rows that max_rows allows"));
}

TEST_F(OrderCheckTest, MoreIterationsThanAreKeptAreRefused) {
  for (std::uint64_t number = 2; number < 6; ++number) {
    decode_.tables.iteration = number;
    accept(decode_.tables);
  }
  decode_.tables.iteration = 6;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("4 others are not finished"));
}

// ---- rows and sequences

TEST_F(OrderCheckTest, AMiniBatchWithoutRowsIsRefused) {
  batch().tokens.clear();
  expect_refused("0 rows");
}

TEST_F(OrderCheckTest, AMiniBatchWithMoreRowsThanItsBuffersIsRefused) {
  batch().tokens.resize(static_cast<std::size_t>(limits_.max_mini_batch_rows) + 1);
  expect_refused("129 rows, not 1 to 128");
}

TEST_F(OrderCheckTest, MoreSequencesThanConfiguredAreRefused) {
  limits_.max_sequences = 1;
  check_.emplace(shape_, layout_, limits_, kCredits);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("2 sequences, not 1 to 1"));
}

TEST_F(OrderCheckTest, PromptsTokensAreThereForEachSequenceWherePositionsFollowFromThem) {
  batch().prompt_tokens.pop_back();
  expect_refused("2 sequences, but the prompt's tokens of 1");
  decode_ = again();
  batch().prompt_tokens.clear();
  shape_ = rotary_shape();
  check_.emplace(shape_, layout_, limits_, kCredits);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }),
              HasSubstr("2 sequences, but the prompt's tokens of 0"));
  shape_.rotary.kind = RotaryKind::plain;
  check_.emplace(shape_, layout_, limits_, kCredits);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), testing::Not(HasSubstr("prompt's tokens")));
}

TEST_F(OrderCheckTest, ATokenBeyondTheVocabularyIsRefused) {
  for (const std::int32_t token : {shape_.vocab_size, -1, std::numeric_limits<int>::min()}) {
    decode_ = again();
    batch().tokens[1] = token;
    EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("of a vocabulary of 37"));
  }
}

TEST_F(OrderCheckTest, PositionsBeyondTheModelOrTheConfiguredContextAreRefused) {
  auto& sequence = batch().sequences[0];
  sequence = Sequence(0, 128, 1, 0, 0);
  expect_refused("all are at most 128");
  limits_.max_context = 40;
  check_.emplace(shape_, layout_, limits_, kCredits);
  decode_ = again();
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("all are at most 40"));
}

TEST_F(OrderCheckTest, AContextThatOverflowsIsRefused) {
  batch().sequences[0] = Sequence(0, 0xffffffff, 1, 0, 0);
  expect_refused("4294967295 tokens of context");
}

TEST_F(OrderCheckTest, ASequenceWithoutNewTokensIsRefused) {
  batch().sequences[0] = Sequence(0, 40, 0, 0, 0);
  expect_refused("at least 1 is new");
}

TEST_F(OrderCheckTest, RowsThatOverlapOrLeaveGapsAreRefused) {
  auto& second = batch().sequences[1];
  second = Sequence(second.request(), second.context(), 1, 0, second.first_entry());
  expect_refused("starts at row 0");
  decode_ = again();
  batch().tokens.push_back(1);
  EXPECT_THAT(refusal([&] {
                decode_.tables.iteration = 3;
                accept(decode_.tables);
              }),
              HasSubstr("have 2 rows of 3"));
}

TEST_F(OrderCheckTest, MissingEntriesAreRefused) {
  auto& first = batch().sequences[0];
  first = Sequence(first.request(), first.context(), first.new_tokens(), 0, 5);
  expect_refused("has entries 5 to 8 of 6");
  decode_ = again();
  batch().sequences[0] = Sequence(0, 40, 1, 0, 0xfffffffe);
  decode_.tables.iteration = 3;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("has entries 4294967294"));
}

TEST_F(OrderCheckTest, MoreEntriesThanSlotsAreRefused) {
  batch().entries.resize(49, batch().entries[0]);
  expect_refused("49 attention entries, not 1 to 48");
}

// ---- loads

TEST_F(OrderCheckTest, ALoadOfBlocksBeyondThePoolIsRefused) {
  for (const Kind kind : {Kind::Kv, Kind::Act}) {
    decode_ = again();
    BlockRun& run = load(kind);
    run = BlockRun(kind, Place::Host, 1, 1, kind == Kind::Kv ? 50 : 40, run.first_slot());
    EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("the Host pool has"));
    run = BlockRun(kind, Place::Host, 1, 2, 0xffffffff, run.first_slot());
    EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("the Host pool has"));
  }
}

TEST_F(OrderCheckTest, ALoadIntoSlotsBeyondTheBufferIsRefused) {
  BlockRun& run = load(Kind::Kv);
  run = BlockRun(Kind::Kv, Place::Host, 16, 2, 1, 23);
  expect_refused("2 Kv slots from 23, the buffer has 24");
}

TEST_F(OrderCheckTest, ALoadWhoseCountOverflowsIsRefused) {
  load(Kind::Act) = BlockRun(Kind::Act, Place::Host, 16, 0xffffffff, 1, 1);
  expect_refused("4294967295 Act blocks from 1");
}

TEST_F(OrderCheckTest, ALoadWithoutBlocksOrWithAnImpossibleTailIsRefused) {
  for (const auto& [count, tail] : {std::pair{0, 16}, {1, 0}, {1, 17}, {1, 65535}}) {
    decode_ = again();
    BlockRun& run = load(Kind::Kv);
    run = BlockRun(Kind::Kv, Place::Host, static_cast<std::uint16_t>(tail),
                   static_cast<std::uint32_t>(count), run.first_block(), run.first_slot());
    EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("tokens of 16"));
  }
}

TEST_F(OrderCheckTest, TwoLoadsIntoOneSlotAreRefused) {
  batch().loads.push_back(batch().loads[0]);
  expect_refused("which another load fills");
}

TEST_F(OrderCheckTest, BlocksOfNoKindOrNoPlaceOrBeyondTheDevicesOwnAreRefused) {
  BlockRun& run = load(Kind::Kv);
  run = BlockRun(static_cast<Kind>(2), Place::Host, 16, 1, 1, 1);
  expect_refused("block kind 2, which is none");
  decode_ = again();
  load(Kind::Kv) = BlockRun(Kind::Kv, Place::Gpu, 16, 1, 1, 1);
  decode_.tables.iteration = 3;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("the Gpu pool has 0"));
  load(Kind::Kv) = BlockRun(Kind::Kv, static_cast<Place>(2), 16, 1, 1, 1);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("place 2, which is none"));
  decode_ = again();
  decode_.tables.iteration = 4;
  const BlockRun act = load(Kind::Act);
  load(Kind::Act) = BlockRun(Kind::Act, Place::Gpu, act.tail_tokens(), act.count(),
                             act.first_block(), act.first_slot());
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("the Gpu pool has 0"));
}

// ---- regeneration

TEST_F(OrderCheckTest, RegenerationBeyondTheBufferIsRefused) {
  batch().regenerate[0] = SlotRange(23, 2);
  expect_refused("2 slots from 23, the ACT buffer has 24");
  decode_ = again();
  batch().regenerate[0] = SlotRange(1, 0xffffffff);
  decode_.tables.iteration = 3;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("4294967295 slots from 1"));
}

TEST_F(OrderCheckTest, RegenerationOfSlotsThatNoLoadFillsIsRefused) {
  std::vector<bool> loaded(24);
  for (const BlockRun& run : batch().loads) {
    for (std::uint32_t i = 0; i < run.count() && run.kind() == Kind::Act; ++i) {
      loaded[run.first_slot() + i] = true;
    }
  }
  const auto free = std::ranges::find(loaded, false) - loaded.begin();
  batch().regenerate[0] = SlotRange(static_cast<std::uint32_t>(free), 1);
  expect_refused("which nothing loads");
}

TEST_F(OrderCheckTest, RegenerationOfOneSlotTwiceIsRefused) {
  batch().regenerate.push_back(batch().regenerate[0]);
  expect_refused("a second time");
}

// ---- attention

TEST_F(OrderCheckTest, AttentionWhereThisDeviceHasNoneIsRefused) {
  for (const Where where : {Where::Activation, Where::HostInPlace, static_cast<Where>(9)}) {
    decode_ = again();
    AttentionEntry& one =
        entry(where == Where::Activation ? Where::RegeneratedKv : Where::LoadedKv);
    one = AttentionEntry(where, one.kind(), one.place(), 0, one.slot(), one.block());
    EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("this device does not do"));
  }
}

TEST_F(OrderCheckTest, ASlotThatDoesNotExistIsRefused) {
  AttentionEntry& one = entry(Where::RegeneratedKv);
  one = AttentionEntry(one.where(), one.kind(), one.place(), 0, 24, one.block());
  expect_refused("is slot 24 of 24");
}

TEST_F(OrderCheckTest, ContextInASlotThatNoLoadFilledIsRefused) {
  const BlockRun run = load(Kind::Kv);
  std::erase_if(batch().loads, [&](const BlockRun& one) {
    return one.kind() == Kind::Kv && one.first_slot() == run.first_slot();
  });
  expect_refused("are read that nothing loads");
}

TEST_F(OrderCheckTest, ContextWhoseBlockIsLoadedInPartIsRefused) {
  const std::size_t full = index_where<BlockRun>(batch().loads, [](const BlockRun& run) {
    return run.kind() == Kind::Kv && run.tail_tokens() == 16;
  });
  const BlockRun run = batch().loads[full];
  batch().loads[full] =
      BlockRun(run.kind(), run.place(), 15, run.count(), run.first_block(), run.first_slot());
  expect_refused("are read that nothing loads");
}

TEST_F(OrderCheckTest, ContextInASlotThatWasNotRegeneratedIsRefused) {
  batch().regenerate.clear();
  expect_refused("that nothing loads and makes");
}

TEST_F(OrderCheckTest, ContextThatIsNeitherKeptNorComputedAgainIsRefused) {
  const auto nowhere = [&](std::size_t i) {
    AttentionEntry& one = batch().entries[i];
    one = AttentionEntry(one.where(), one.kind(), Place::Nowhere, 0, one.slot(), one.block());
  };
  const std::size_t old = index_where<AttentionEntry>(
      batch().entries, [](const auto& one) { return one.where() == Where::LoadedKv; });
  nowhere(old);
  expect_refused("are another's too");  // its slot is loaded
  decode_ = again();
  const std::uint32_t slot = batch().entries[old].slot();
  std::erase_if(batch().loads, [&](const BlockRun& run) {
    return run.kind() == Kind::Kv && run.first_slot() <= slot &&
           slot < run.first_slot() + run.count();
  });
  nowhere(old);
  decode_.tables.iteration = 3;
  EXPECT_NE(refusal([&] { accept(decode_.tables); }), "");
  decode_ = again();
  nowhere(index_where<AttentionEntry>(
      batch().entries, [](const auto& one) { return one.where() == Where::RegeneratedKv; }));
  decode_.tables.iteration = 4;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("is kept nowhere"));
}

// Behind prompts of 40 tokens a window of 20 leaves the first block unseen, and no other.
TEST_F(OrderCheckTest, DroppedBlocksAreThoseThatNoLayerSees) {
  const auto drop = [&](std::uint32_t block) {
    const Sequence& sequence = batch().sequences[0];
    AttentionEntry& one = batch().entries[sequence.first_entry() + block];
    const Kind kind = one.kind();
    const std::uint32_t slot = one.slot();
    std::erase_if(batch().loads, [&](const BlockRun& run) {
      return run.kind() == kind && run.count() == 1 && run.first_slot() == slot;
    });
    std::erase_if(batch().regenerate, [&](const SlotRange& range) {
      return kind == Kind::Act && range.count() == 1 && range.first_slot() == slot;
    });
    one = AttentionEntry(Where::LoadedKv, Kind::Kv, Place::Dropped, 0, 0, 0);
  };
  std::uint64_t number = decode_.tables.iteration;
  const auto with_windows = [&](std::uint32_t layers) {
    shape_.sliding_window = 20;
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      shape_.set_window({layer});
    }
    check_.emplace(shape_, layout_, limits_, kCredits);
    accept_all(prefill_);
    decode_ = again();
    decode_.tables.iteration = number;
  };
  with_windows(2);  // one layer has none
  drop(0);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("0 blocks are not seen"));
  with_windows(3);
  drop(1);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }),
              HasSubstr("sequence 0, block 1 is dropped, but its rows see it"));
  with_windows(3);
  drop(0);
  batch().loads.emplace_back(Kind::Kv, Place::Dropped, 16, 1, 0, 0);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("is of place 3, which is none"));
  batch().loads.pop_back();
  AttentionEntry& entry = batch().entries[batch().sequences[0].first_entry()];
  entry = AttentionEntry(Where::RegeneratedKv, Kind::Act, Place::Dropped, 0, 0, 0);
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("is dropped: it is of kind Kv"));
  with_windows(3);
  drop(0);
  accept(decode_.tables);
}

TEST_F(OrderCheckTest, ContextOfAnotherBlockThanWasLoadedIsRefused) {
  const std::size_t old = index_where<AttentionEntry>(
      batch().entries, [](const auto& one) { return one.where() == Where::LoadedKv; });
  AttentionEntry& one = batch().entries[old];
  one = AttentionEntry(one.where(), one.kind(), one.place(), 0, one.slot(), one.block() ^ 1);
  expect_refused("holds Kv block");
}

// Of requests whose prompts begin alike: both read the block in the slot that it is loaded to.
TEST_F(OrderCheckTest, TwoSequencesMayReadOneFullBlockInOneSlot) {
  const auto first_entry = [&](std::size_t sequence) -> AttentionEntry& {
    return batch().entries[batch().sequences[sequence].first_entry()];
  };
  ASSERT_NE(first_entry(0).block(), first_entry(1).block());
  first_entry(1) = first_entry(0);
  accept_all(decode_);
  EXPECT_TRUE(check_->between_iterations());
}

TEST_F(OrderCheckTest, NewRowsOfTwoSequencesInOneSlotAreRefused) {
  const auto last_entry = [&](std::size_t sequence) -> AttentionEntry& {
    const Sequence& one = batch().sequences[sequence];
    return batch().entries[one.first_entry() + (one.context() + one.new_tokens() - 1) / 16];
  };
  last_entry(1) = last_entry(0);
  expect_refused("are another's too");
}

// ---- stores

TEST_F(OrderCheckTest, AStoreBeyondItsBlockItsRowsOrThePoolIsRefused) {
  const Store right = batch().stores[0];
  const auto refused = [&](const Store& store, const std::string& sentence) {
    decode_ = again();
    batch().stores[0] = store;
    EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr(sentence));
  };
  const auto kind = right.kind();
  refused(Store(kind, Place::Host, 16, 1, 0, right.block()), "1 rows from token 16");
  refused(Store(kind, Place::Host, 15, 2, 0, right.block()), "2 rows from token 15");
  refused(Store(kind, Place::Host, 8, 0, 0, right.block()), "0 rows from token 8");
  refused(Store(kind, Place::Host, 8, 0xffffffff, 0, right.block()), "4294967295 rows");
  refused(Store(kind, Place::Host, 8, 1, 2, right.block()), "1 rows from 2, there are 2");
  refused(Store(kind, Place::Host, 8, 1, 0xffffffff, right.block()), "from 4294967295");
  refused(Store(kind, Place::Host, right.token(), 1, 0, 50), "goes to");
  refused(Store(kind, Place::Gpu, right.token(), 1, 0, right.block()), "the Gpu pool has 0");
  refused(Store(static_cast<Kind>(77), Place::Host, 8, 1, 0, 1), "block kind 77");
}

TEST_F(OrderCheckTest, AStoreOfRowsOfAnotherBlockIsRefused) {
  const Store right = batch().stores[0];
  batch().stores[0] =
      Store(right.kind(), right.place(), static_cast<std::uint16_t>((right.token() + 1) % 16), 1,
            right.row(), right.block());
  expect_refused("puts position 40 at token");
  decode_ = again();
  batch().stores[0] = Store(right.kind(), right.place(), right.token(), 2, 0, right.block());
  decode_.tables.iteration = 3;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("rows of two sequences"));
  decode_ = again();
  batch().stores[0] =
      Store(right.kind(), right.place(), right.token(), 1, right.row(), right.block() ^ 1);
  decode_.tables.iteration = 3;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr("its sequence has block"));
}

TEST_F(OrderCheckTest, AStoreIntoKvBlocksOnTheDeviceThatItsSequenceDoesNotReadIsRefused) {
  limits_.gpu_kv_blocks = 4;
  check_.emplace(shape_, layout_, limits_, kCredits);
  const Store right = batch().stores[0];
  batch().stores[0] = Store(Kind::Kv, Place::Gpu, right.token(), 1, right.row(), 1);
  expect_refused("which its sequence does not read");
}

// Attention writes new rows into KV blocks on the device by the entries alone, so an entry must name an
// existing block. The stores must name every row, since the check uses them to keep blocks apart.
TEST_F(OrderCheckTest, NewRowsInKvBlocksOnTheDeviceNeedTheirEntriesAndStores) {
  limits_.gpu_kv_blocks = limits_.gpu_act_blocks = 4;
  const auto prompts = [&] {
    return SmallPlanner(plan_, layout_, limits_, pool_.partition).next();
  };
  const auto of_device = [](const auto& one) {
    return one.kind() == Kind::Kv && one.place() == Place::Gpu;
  };
  const auto refused = [&](const std::function<void(MiniBatchT&, AttentionEntry&)>& change,
                           const std::string& sentence) {
    check_.emplace(shape_, layout_, limits_, kCredits);
    Planned planned = prompts();
    MiniBatchT& batch = *planned.tables.mini_batches[0];
    change(batch, batch.entries[index_where<AttentionEntry>(batch.entries, of_device)]);
    EXPECT_THAT(refusal([&] { accept(planned.tables); }), HasSubstr(sentence));
    check_.emplace(shape_, layout_, limits_, kCredits);
    accept(prompts().tables);
  };
  const auto in = [](const AttentionEntry& one, Where where, Kind kind, std::uint32_t block) {
    return AttentionEntry(where, kind, Place::Gpu, 0, one.slot(), block);
  };
  refused(
      [&](MiniBatchT& batch, AttentionEntry& one) {
        std::erase_if(batch.stores, of_device);
        one = in(one, Where::LoadedKv, Kind::Kv, 4);
      },
      "is Kv block 4, the Gpu pool has 4");
  // 24 slots of the buffer, and one without memory for each of the device's blocks.
  refused(
      [&](MiniBatchT&, AttentionEntry& one) {
        one = AttentionEntry(one.where(), one.kind(), Place::Gpu, 0, 28, one.block());
      },
      "is slot 28 of 28");
  refused(
      [&](MiniBatchT&, AttentionEntry& one) {
        one = AttentionEntry(one.where(), one.kind(), Place::Host, 0, 24, one.block());
      },
      "is slot 24 of 24");
  refused([&](MiniBatchT& batch, AttentionEntry&) { std::erase_if(batch.stores, of_device); },
          "which nothing stores");
  refused(
      [&](MiniBatchT& batch, AttentionEntry&) {
        Store& store = batch.stores[index_where<Store>(batch.stores, of_device)];
        store = Store(store.kind(), store.place(), store.token(), store.count() - 1, store.row(),
                      store.block());
      },
      "which nothing stores");
  refused(
      [&](MiniBatchT& batch, AttentionEntry& one) {
        std::erase_if(batch.stores, of_device);
        one = in(one, Where::LoadedKv, Kind::Act, 0);
      },
      "is of kind Act");
  refused([&](MiniBatchT&,
              AttentionEntry& one) { one = in(one, Where::RegeneratedKv, Kind::Kv, one.block()); },
          "is of kind Kv");
}

TEST_F(OrderCheckTest, TwoStoresOfTheSameRowsAreRefused) {
  batch().stores.push_back(batch().stores[0]);
  expect_refused("that are stored already");
}

TEST_F(OrderCheckTest, ALoadOfRowsThatALaterMiniBatchStoresIsRefused) {
  const Store later = decode_.tables.mini_batches[1]->stores[0];
  const std::uint32_t free_slot = [&] {
    std::vector<bool> used(24);
    for (const BlockRun& run : batch().loads) {
      for (std::uint32_t i = 0; i < run.count() && run.kind() == later.kind(); ++i) {
        used[run.first_slot() + i] = true;
      }
    }
    return static_cast<std::uint32_t>(std::ranges::find(used, false) - used.begin());
  }();
  batch().loads.emplace_back(later.kind(), Place::Host, 16, 1, later.block(), free_slot);
  expect_refused("that mini-batch 1 only stores");
}

// ---- samples

TEST_F(OrderCheckTest, ImpossibleSamplesAreRefused) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto refused = [&](const std::function<void(messages::SampleT&)>& change,
                           const std::string& sentence) {
    decode_ = again();
    change(*batch().samples[0]);
    EXPECT_THAT(refusal([&] { accept(decode_.tables); }), HasSubstr(sentence));
  };
  refused([](auto& sample) { sample.sequence = 2; }, "that does not exist");
  refused([](auto& sample) { sample.sequence = 1; }, "again");
  refused([&](auto& sample) { sample.temperature = nan; }, "temperature nan");
  refused([](auto& sample) { sample.temperature = -1; }, "temperature -1");
  refused([&](auto& sample) { sample.top_p = nan; }, "top_p nan");
  refused([](auto& sample) { sample.top_p = 0; }, "top_p 0");
  refused([](auto& sample) { sample.top_k = -1; }, "top_k -1");
  refused([](auto& sample) { sample.logprobs = 21; }, "wants 21 logprobs");
  refused([](auto& sample) { sample.logprobs = -2; }, "wants -2 logprobs");
  refused([](auto& sample) { sample.prompt_targets.push_back(1); }, "2 prompt targets for 1 rows");
  refused([](auto& sample) { sample.prompt_logprobs = false; }, "1 prompt targets for 0 rows");
  refused([](auto& sample) { sample.prompt_targets[0] = 37; }, "prompt target 37");
  refused([](auto& sample) { sample.prompt_targets[0] = -2; }, "prompt target -2");
  refused([&](auto& sample) { sample.min_p = nan; }, "min_p nan");
  refused([](auto& sample) { sample.min_p = 1.5f; }, "min_p 1.5");
  refused([](auto& sample) { sample.prompt_top = 21; }, "wants 21 logprobs of its prompt");
}

TEST_F(OrderCheckTest, ImpossibleEditsOfLogitsAreRefused) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto with = [&](
                        std::vector<messages::LogitEdit> edits,
                        const std::function<void(messages::SampleT&)>& change = [](auto&) {}) {
    decode_ = again();
    messages::SampleT& sample = *batch().samples[0];
    sample.prompt_logprobs = false;
    sample.prompt_targets.clear();
    sample.edits = std::move(edits);
    change(sample);
    return refusal([&] { accept(decode_.tables); });
  };
  EXPECT_THAT(with({{3, 0, 1, 0}, {3, 0, 1, 0}}), HasSubstr("edit 1 of sample 0 is of token 3"));
  EXPECT_THAT(with({{-1, 0, 1, 0}}), HasSubstr("is of token -1"));
  EXPECT_THAT(with({{37, 0, 1, 0}}), HasSubstr("is of token 37"));
  EXPECT_THAT(with({{3, nan, 1, 0}}), HasSubstr("bias nan"));
  EXPECT_THAT(with({{3, infinity, 1, 0}}), HasSubstr("bias inf"));
  EXPECT_THAT(with({{3, 0, 0, 0}}), HasSubstr("factor 0"));
  EXPECT_THAT(with({{3, 0, infinity, 0}}), HasSubstr("factor inf"));
  EXPECT_THAT(with({{3, 0, 1, -infinity}}), HasSubstr("minus -inf"));
  EXPECT_THAT(with({{1, 0, 1, 0}, {2, 0, 1, 0}, {3, 0, 1, 0}, {4, 0, 1, 0}, {5, 0, 1, 0}}),
              HasSubstr("has 5 edits of logits; logit_edits allows 4"));
  EXPECT_THAT(with({{3, 0, 1, 0}}, [](auto& sample) { sample.generate = false; }),
              HasSubstr("generates nothing"));
  EXPECT_THAT(with({{3, 0, 1, 0}},
                   [](auto& sample) {
                     sample.prompt_logprobs = true;
                     sample.prompt_targets = {1};
                   }),
              HasSubstr("a row that has a prompt target"));
  EXPECT_EQ(with({{3, -infinity, 1, 0}, {36, 100, 0.5f, -2}}), "");
}

TEST_F(OrderCheckTest, ImpossibleMasksAreRefused) {
  const auto with = [&](
                        std::vector<std::uint32_t> mask, std::size_t edits = 0,
                        const std::function<void(messages::SampleT&)>& change = [](auto&) {}) {
    decode_ = again();
    messages::SampleT& sample = *batch().samples[0];
    sample.prompt_logprobs = false;
    sample.prompt_targets.clear();
    for (std::size_t i = 0; i < edits; ++i) {
      sample.edits.emplace_back(static_cast<std::int32_t>(i), 0.0f, 1.0f, 0.0f);
    }
    sample.mask = std::move(mask);
    change(sample);
    return refusal([&] { accept(decode_.tables); });
  };
  EXPECT_THAT(with({1}), HasSubstr("a mask of 1 words; a vocabulary of 37 has 2"));
  EXPECT_THAT(with({1, 0, 0}), HasSubstr("a mask of 3 words"));
  EXPECT_THAT(with({1, 1 << 5}), HasSubstr("allows tokens beyond the vocabulary of 37"));
  EXPECT_THAT(with({1, 0}, 4), HasSubstr("has 5 edits of logits; logit_edits allows 4"));
  EXPECT_THAT(with({1, 0}, 0, [](auto& sample) { sample.generate = false; }),
              HasSubstr("generates nothing"));
  EXPECT_THAT(with({1, 0}, 0,
                   [](auto& sample) {
                     sample.prompt_logprobs = true;
                     sample.prompt_targets = {1};
                   }),
              HasSubstr("a row that has a prompt target"));
  EXPECT_EQ(with({~0u, 31}, 3), "");
}

// ---- layer orders

TEST_F(OrderCheckTest, AnOrderOfAnIterationThatDidNotBeginIsRefused) {
  expect_order_refused(decode_.orders[0], "iteration 2, which was not begun");
  expect_order_refused(prefill_.orders.back(),
                       "iteration 1, which was not begun, was refused or "
                       "is over");
}

TEST_F(OrderCheckTest, StagesOutOfOrderAreRefused) {
  accept(decode_.tables);
  expect_order_refused(decode_.orders[1], "is of stage 1, stage 0 is next");
  accept(decode_.orders[0]);
  expect_order_refused(decode_.orders[0], "is of stage 0, stage 1 is next");
  decode_.orders[1].stage = 0xffffffff;
  expect_order_refused(decode_.orders[1], "is of stage 4294967295");
}

TEST_F(OrderCheckTest, AnOrderAheadOfTheIterationBeforeIsRefused) {
  accept(decode_.tables);
  decode_.tables.iteration = 3;
  accept(decode_.tables);
  decode_.orders[0].iteration = 3;
  expect_order_refused(decode_.orders[0], "while iteration 2 still lacks orders");
}

TEST_F(OrderCheckTest, MiniBatchesThatAreMissingTwiceThereOrUnknownAreRefused) {
  accept(decode_.tables);
  LayerOrderT order = decode_.orders[0];
  order.mini_batches = {0};
  expect_order_refused(order, "names 1 of 2 mini-batches");
  order.mini_batches = {};
  expect_order_refused(order, "names 0 of 2 mini-batches");
  order.mini_batches = {0, 0};
  expect_order_refused(order, "names mini-batch 0 twice");
  order.mini_batches = {0, 7};
  expect_order_refused(order, "names mini-batch 7 that does not exist");
}

TEST_F(OrderCheckTest, AMiniBatchBeforeTheOneWhoseRowsItLoadsIsRefused) {
  plan_.chunk = 13;
  plan_.chunks_at_once = 2;
  plan_.per_batch = 4;
  SmallPlanner planner(plan_, layout_, limits_, pool_.partition);
  Planned planned = planner.next();
  check_.emplace(shape_, layout_, limits_, kCredits);
  EXPECT_THAT(accept(planned.tables),
              testing::ElementsAre(std::vector<std::uint32_t>{}, std::vector<std::uint32_t>{0}));
  planned.orders[0].mini_batches = {1, 0};
  expect_order_refused(planned.orders[0], "mini-batch 1 before 0, whose rows it loads");
}

TEST_F(OrderCheckTest, MoreOrdersThanCreditsAreRefused) {
  check_.emplace(shape_, layout_, limits_, 2);
  accept(prefill_.tables);
  accept(prefill_.orders[0]);
  accept(prefill_.orders[1]);
  expect_order_refused(prefill_.orders[2], "beyond the 2 credits");
  check_->done();
  accept(prefill_.orders[2]);
}

TEST_F(OrderCheckTest, FetchesOfLayersThatAreNotStreamedAreRefused) {
  accept(decode_.tables);
  const auto refused = [&](const WeightFetch& fetch, const std::string& sentence) {
    LayerOrderT order = decode_.orders[0];
    order.fetch = {fetch};
    expect_order_refused(order, sentence);
  };
  refused(WeightFetch(0, 0, 0), "layer 0, which is resident");
  refused(WeightFetch(3, 0, 0), "layer 3 of a model of 3");
  refused(WeightFetch(0xffffffff, 0, 0), "layer 4294967295");
  refused(WeightFetch(2, 4, 0), "piece 4 of layer 2, which it does not have");
  refused(WeightFetch(2, 64, 0), "piece 64");
  refused(WeightFetch(2, 0, 2), "after mini-batch 2 of 2");
  // Layer 1 was fetched at the end of the iteration before.
  refused(WeightFetch(1, 0, 0), "piece 0 of layer 1 a second time");
}

TEST_F(OrderCheckTest, FetchesWithoutAFreeBufferAreRefused) {
  ModelShape shape = shape_;
  shape.num_hidden_layers = 5;
  layout_ = weight_layout(shape, DType::float32);
  check_.emplace(shape, layout_, limits_, kCredits);
  SmallPlanner planner(plan_, layout_, limits_, pool_.partition);
  Planned planned = planner.next();
  accept(planned.tables);
  planned.orders[0].fetch = {WeightFetch(1, 0, 0), WeightFetch(2, 0, 0), WeightFetch(3, 0, 0)};
  expect_order_refused(planned.orders[0], "both layer buffers hold layers not computed yet");
}

TEST_F(OrderCheckTest, ALayerWithoutItsWeightsIsRefused) {
  accept(decode_.tables);
  accept(decode_.orders[0]);
  accept(decode_.orders[1]);
  LayerOrderT order = decode_.orders[2];
  order.fetch.pop_back();  // of layer 2
  accept(order);
  expect_order_refused(decode_.orders[3], "computes layer 2, whose weights were not all fetched");
}

TEST_F(OrderCheckTest, AfterAnAbandonedIterationTheNextBeginsWithFreshFetches) {
  accept(decode_.tables);
  accept(decode_.orders[0]);
  accept(decode_.orders[1]);
  accept(decode_.orders[2]);  // fetched layer 2
  check_->abandon();
  expect_order_refused(decode_.orders[3], "iteration 2, which was not begun");
  decode_.tables.iteration = 3;
  accept(decode_.tables);
  for (std::size_t stage = 0; stage < decode_.orders.size(); ++stage) {
    LayerOrderT order = decode_.orders[stage];
    order.iteration = 3;
    if (stage == 0) {
      order.fetch = prefill_.orders[0].fetch;
    }
    check_->done();
    accept(order);
  }
}

// ---- pools and buffers

TEST_F(OrderCheckTest, APoolThatDoesNotFitItsSegmentIsRefused) {
  const BlockSizes sizes = block_sizes(shape_, DType::float32, KvFormat::plain);
  PoolPartition pool = pool_.partition;
  check_pool(pool, sizes, 3, {3 << 20});
  EXPECT_THROW(check_pool(pool, sizes, 3, {(3 << 20) - 1}), Failure);
  pool.act_blocks = 0xffffffff;
  EXPECT_THROW(check_pool(pool, sizes, 3, {3 << 20}), Failure);
  pool = pool_.partition;
  pool.region_bytes = 0xffffffffffffffff;
  EXPECT_THROW(check_pool(pool, sizes, 3, {3 << 20}), Failure);
  pool.region_bytes = 0;
  EXPECT_THROW(check_pool(pool, sizes, 3, {3 << 20}), Failure);
}

TEST_F(OrderCheckTest, APoolOfAnotherKvFormatThanTheBuffersIsRefused) {
  pool_.kv_format = KvFormat::int8;
  EXPECT_THAT(refusal([&] { accept(decode_.tables); }),
              HasSubstr("whose KV format is int8, the buffers' is auto"));
  pool_.kv_format = KvFormat::plain;
  accept(decode_.tables);
  messages::ConfigureT configure;
  configure.kv_format = messages::KvFormat::Int4;
  EXPECT_EQ(limits_of(*Packed<messages::Configure>(configure)).kv_format, KvFormat::int4);
  configure.kv_format = static_cast<messages::KvFormat>(3);
  EXPECT_THAT(refusal([&] { limits_of(*Packed<messages::Configure>(configure)); }),
              HasSubstr("format 3: there are 3 formats"));
}

// ---- at random

// ThreadSanitizer looks for races, and a few runs show those; AddressSanitizer looks at all.
#ifdef __has_feature
#if __has_feature(thread_sanitizer)
#define POISE_FEW_ROUNDS
#endif
#endif
#ifdef POISE_FEW_ROUNDS
constexpr int kRounds = 60;
#else
constexpr int kRounds = 300;
#endif

// Messages with fields changed at random are refused, or harmless: then they run, under the
// sanitizers, over memory that holds nothing but what the tables may touch.
TEST(OrderMutation, AcceptedOrdersAreHarmless) {
  const std::uint32_t seed = 20261121;
  std::mt19937 random(seed);
  const TinyModel model(tiny_shape(), DType::float32, 2);
  Plan plan{.sequences = random_sequences(model.shape, {30, 37, 21, 45}, 3), .kind = mixed};
  Setting setting;
  setting.act_blocks = setting.kv_blocks = 16;
  int refused = 0, ran = 0;
  for (int round = 0; round < kRounds; ++round) {
    plan.seed = random();
    setting.limits.gpu_act_blocks = setting.limits.gpu_kv_blocks = round % 2 * 5;
    PipelineRun mutated(model, plan, setting);
    mutated.mutate([&](std::span<std::uint32_t> words) {
      if (random() % 60 != 0) {  // of about 170 messages
        return;
      }
      const std::uint32_t interesting[] = {0,  1,  15,     16,         17,         23,
                                           24, 25, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff};
      const std::size_t at = random() % words.size();
      words[at] = random() % 2 == 0 ? interesting[random() % std::size(interesting)]
                                    : words[at] + random() % 5 - 2;
    });
    try {
      mutated.run();
      ++ran;
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.code(), Exit::cannot_start) << "seed " << seed << ": " << failure.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, kRounds / 6) << "seed " << seed;
  EXPECT_GT(ran, kRounds / 30) << "seed " << seed;
}

}  // namespace
}  // namespace poise::test
