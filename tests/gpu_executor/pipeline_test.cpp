#include "gpu_executor/pipeline.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>
#include <tuple>

#include "tests/gpu_executor/pipeline_run.h"

namespace poise::test {
namespace {

TEST(Pipeline, ComputesWhatStraightLoopsCompute) {
  const TinyModel model(tiny_shape(), DType::float32, 3);
  const Plan plan = six_sequences(model.shape);
  expect_as_plain(model, plan, run_pipeline(model, plan), 2e-4);
}

TEST(Pipeline, ComputesAPostNormModelWithProjectedEmbeddings) {
  const TinyModel model(post_norm_shape(), DType::float32, 4);
  const Plan plan = six_sequences(model.shape);
  expect_as_plain(model, plan, run_pipeline(model, plan), 2e-4);
}

TEST(Pipeline, ComputesModelsWhoseMatricesHaveOneRow) {
  ModelShape shape = post_norm_shape();
  shape.ffn_dim = 1;
  shape.word_embed_proj_dim = 1;
  const TinyModel model(shape, DType::float32, 9);
  const Plan plan = six_sequences(model.shape);
  expect_as_plain(model, plan, run_pipeline(model, plan), 2e-4);
}

TEST(Pipeline, ComputesModelsStoredInHalfPrecision) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const TinyModel model(tiny_shape(), dtype, 5);
    const Plan plan = six_sequences(model.shape);
    // A stored value may be rounded the other way where double and float32 disagree.
    expect_as_plain(model, plan, run_pipeline(model, plan), dtype == DType::float16 ? 5e-3 : 4e-2);
  }
}

TEST(Pipeline, ComputesModelsWithoutBiasAffineNormsOrTiedHeadAndWithSharedKeys) {
  ModelShape shape = tiny_shape();
  shape.qkv_bias = shape.output_bias = shape.mlp_bias = 0;
  shape.layer_norm_elementwise_affine = 0;
  shape.tie_word_embeddings = 0;
  shape.num_attention_heads = 4;
  shape.num_key_value_heads = 2;
  shape.activation_function = Activation::gelu_tanh;
  const TinyModel model(shape, DType::float32, 6);
  const Plan plan = six_sequences(model.shape);
  expect_as_plain(model, plan, run_pipeline(model, plan), 2e-4);
}

TEST(Pipeline, ComputesAModelWithRotatedHeadsAGateAndAWindow) {
  const std::pair<DType, double> kinds[] = {{DType::float32, 2e-4}, {DType::float16, 1e-2}};
  for (const auto& [dtype, tolerance] : kinds) {
    const TinyModel model(rotary_shape(), dtype, 12);
    for (const auto& kind : {all_kv, all_act}) {
      Plan plan = six_sequences(model.shape);
      plan.kind = kind;
      expect_as_plain(model, plan, run_pipeline(model, plan), tolerance);
    }
  }
}

// The tables are the same for all layers; the middle one has a window.
TEST(Pipeline, LoadsInALayerWithAWindowOnlyWhatItsRowsSee) {
  const TinyModel model(rotary_shape(), DType::float32, 12);
  for (const auto& kind : {all_kv, all_act}) {
    Plan plan = six_sequences(model.shape);
    plan.kind = kind;
    std::map<std::uint32_t, std::uint64_t> bytes, blocks;  // by stage
    for (const messages::LayerDoneT& layer : run_pipeline(model, plan).layers) {
      bytes[layer.stage] += layer.link->kv() + layer.link->act();
      for (const messages::MiniBatchReport& batch : layer.mini_batches) {
        blocks[layer.stage] += batch.kv_blocks() + batch.act_blocks();
      }
    }
    EXPECT_EQ(bytes[1], bytes[3]);
    // A window of 9 tokens sees two of at most four blocks.
    EXPECT_LT(3 * bytes[2], 2 * bytes[1]);
    EXPECT_EQ(blocks[1], blocks[3]);
    EXPECT_LT(3 * blocks[2], 2 * blocks[1]);
    EXPECT_GT(blocks[2], 0u);
  }
}

Setting quantized(KvFormat format) {
  Setting setting;
  setting.limits.kv_format = format;
  return setting;
}

// Where double and float32 disagree, a number between two codes may get the other one: rarely, but then it
// is a whole scale off. Between the two models is much more than that.
TEST(Pipeline, ComputesWithQuantisedContextWhatStraightLoopsCompute) {
  const std::pair<KvFormat, double> kinds[] = {{KvFormat::int8, 2e-3}, {KvFormat::int4, 1e-2}};
  for (const auto& [format, tolerance] : kinds) {
    const TinyModel model(rotary_shape(), DType::float32, 12);
    Plan plan = six_sequences(model.shape);
    plan.kind = mixed;
    expect_as_plain(model, plan, run_pipeline(model, plan, quantized(format)), tolerance, format);
  }
}

// Loaded, made again from ACT blocks or from tokens, on the host or the device, in parts of any size.
TEST(Pipeline, GivesQuantisedContextTheSameBitsWhateverThePlan) {
  for (const auto& [shape, dtype, format] :
       {std::tuple{tiny_shape(), DType::float32, KvFormat::int8},
        {rotary_shape(), DType::float16, KvFormat::int4},
        {tiny_shape(), DType::bfloat16, KvFormat::int4}}) {
    SCOPED_TRACE(testing::Message() << name_of(dtype) << " as " << name_of(format));
    const TinyModel model(shape, dtype, 11);
    Plan plan = six_sequences(model.shape);
    const auto plain = run_pipeline(model, plan).rows;
    const auto expected = run_pipeline(model, plan, quantized(format)).rows;
    EXPECT_FALSE(expected == plain);
    const auto expect_same = [&](const Setting& setting) {
      EXPECT_TRUE(run_pipeline(model, plan, setting).rows == expected);
    };
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
      Setting setting = quantized(format);
      setting.device.jitter = seed;
      setting.device.threads = 1 + static_cast<int>(seed % 2);
      setting.hold = seed % 2 == 0;
      setting.limits.resident_layers = static_cast<std::int32_t>(seed % 4);
      // KV Gen in parts: fewer rows at a time than a mini-batch has blocks for.
      setting.limits.max_mini_batch_rows = seed % 3 == 0 ? 20 : 128;
      setting.limits.gpu_act_blocks = seed > 3 ? 5 : 0;
      setting.limits.gpu_kv_blocks = seed > 2 ? 7 : 0;
      setting.limits.max_rows = 600;
      plan.kind = seed % 3 == 1 ? all_act : mixed;
      plan.chunk = seed % 2 == 0 ? 7 : 1000;
      plan.chunks_at_once = seed == 4 ? 2 : 1;
      plan.nowhere = seed == 5 ? 1 : 0;
      plan.per_batch = static_cast<std::int32_t>(seed % 3) + 1;
      plan.seed = static_cast<std::uint32_t>(seed);
      expect_same(setting);
    }
  }
}

TEST(Pipeline, ComputesAModelWithPackedMatrices) {
  const TinyModel model(packed_shape(), DType::float32, 12);
  for (const bool unpacks_first : {false, true}) {
    for (const auto& kind : {all_kv, all_act}) {
      Plan plan = six_sequences(model.shape);
      plan.kind = kind;
      Setting setting;
      setting.device.unpacks_first = unpacks_first;
      expect_as_plain(model, plan, run_pipeline(model, plan, setting), 2e-4);
    }
  }
}

TEST(Pipeline, ComputesTheSameWhereMatricesCrossInManyPieces) {
  const std::pair<ModelShape, DType> kinds[] = {{tiny_shape(), DType::float32},
                                                {tiny_shape(), DType::float16},
                                                {packed_shape(), DType::bfloat16},
                                                {bfloat12_shape(), DType::bfloat16}};
  for (const auto& [shape, dtype] : kinds) {
    const TinyModel whole(shape, dtype, 5), cut(shape, dtype, 5, Bytes{700});
    ASSERT_EQ(whole.layout.layer.pieces.size(), 4u);
    ASSERT_GT(cut.layout.layer.pieces.size(), 8u);
    Plan plan = six_sequences(whole.shape);
    Setting setting;
    setting.limits.resident_layers = 0;
    const Outcome expected = run_pipeline(whole, plan, setting);
    for (const bool late : {false, true}) {
      plan.late_weights = late;
      const Outcome outcome = run_pipeline(cut, plan, setting);
      EXPECT_TRUE(outcome.rows == expected.rows);
      ASSERT_EQ(outcome.layers.size(), expected.layers.size());
      std::uint64_t bytes = 0, expected_bytes = 0;
      for (std::size_t i = 0; i < outcome.layers.size(); ++i) {
        bytes += outcome.layers[i].link->weights();
        expected_bytes += expected.layers[i].link->weights();
      }
      if (late) {  // leaves out most fetches that no order waits for at the end
        EXPECT_LT(bytes, expected_bytes);
      } else {
        EXPECT_EQ(bytes, expected_bytes);
      }
    }
  }
}

TEST(Pipeline, SaysWhatComputationWaitedFor) {
  const TinyModel model(tiny_shape(), DType::float32, 5);
  const Plan plan = six_sequences(model.shape);
  const auto shares = [&](double link, std::int32_t resident) {
    Setting setting;
    setting.limits.resident_layers = resident;
    setting.device.link_bytes_per_s = link;
    setting.device.compute_flops = 1e9;
    setting.hold = true;  // so no wait follows from when orders come
    std::array<std::uint64_t, 3> sums{};
    const Outcome outcome = run_pipeline(model, plan, setting);
    for (const messages::LayerDoneT& layer : outcome.layers) {
      const messages::ComputeWaits& waits = *layer.waits;
      EXPECT_EQ(waits.weights_ns() + waits.blocks_ns() + waits.rows_ns(), layer.compute->wait_ns());
      if (layer.iteration == outcome.layers.front().iteration) {
        continue;  // which waits for the resident layers, too
      }
      sums[0] += waits.weights_ns();
      sums[1] += waits.blocks_ns();
      sums[2] += waits.rows_ns();
    }
    return sums;
  };
  const auto resident = shares(4e6, 3), streamed = shares(4e6, 0);
  EXPECT_GT(resident[1], 4 * (resident[0] + resident[2]))
      << "the link brings nothing but blocks, " << resident[0] << " and " << resident[2];
  EXPECT_GT(streamed[0], 4 * resident[0]);
}

TEST(Pipeline, SaysHowLongTheDeviceRestedBeforeAnIteration) {
  const TinyModel model(tiny_shape(), DType::float32, 5);
  const Plan plan = six_sequences(model.shape);
  const auto least = [&](const Setting& setting) {
    std::vector<std::uint64_t> rests;
    for (const messages::LayerDoneT& order : run_pipeline(model, plan, setting).layers) {
      if (order.stage == 0) {
        rests.push_back(order.rested_ns);
      } else {
        EXPECT_EQ(order.rested_ns, 0u);
      }
    }
    EXPECT_GT(rests.size(), 2u);
    EXPECT_EQ(rests.front(), 0u) << "there was none before";
    return *std::min_element(rests.begin() + 1, rests.end());
  };
  EXPECT_EQ(least({.hold = true}), 0u) << "the next is there before the last is done";
  const std::uint64_t rest = least({.rest = {0.02}});
  EXPECT_GE(rest, 20'000'000u);
  EXPECT_LT(rest, 10'000'000'000u) << "a time of another clock";
}

// So short an iteration that the next but one is queued while its head still waits.
// More edits and masks than there is room for at a time: the head runs in more chunks, and brings each chunk's own.
TEST(Pipeline, SamplesFromLogitsThatAreEdited) {
  const TinyModel model(tiny_shape(), DType::float32, 11);
  for (const std::int32_t room : {4, 5, 7, 100}) {
    for (const bool hold : {false, true}) {
      Plan plan{.sequences = random_sequences(model.shape, {20, 20, 3, 20, 20, 20, 20}, 3),
                .kind = mixed,
                .per_batch = 3,
                .edits = true};
      Setting setting;
      setting.limits.logit_edits = room;
      setting.hold = hold;
      const Outcome outcome = run_pipeline(model, plan, setting);
      for (std::uint32_t request = 0; request < plan.sequences.size(); ++request) {
        const auto& bits = outcome.rows.at({request, plan.sequences[request].size()});
        EXPECT_TRUE(bits[0] == request || bits[0] == request + 3) << request << ": " << bits[0];
      }
    }
  }
}

TEST(Pipeline, RunsAModelOfOneLayerAheadOfItself) {
  ModelShape shape = tiny_shape();
  shape.num_hidden_layers = 1;
  const TinyModel model(shape, DType::float32, 8);
  Plan plan = six_sequences(shape);
  plan.per_batch = 6;
  Setting setting;
  setting.device.synchronous = true;
  const Outcome expected = run_pipeline(model, plan, setting);
  setting.device.synchronous = false;
  setting.hold = true;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    setting.device.jitter = seed;
    EXPECT_TRUE(run_pipeline(model, plan, setting).rows == expected.rows) << "seed " << seed;
  }
}

// By stream: what a trace's spans take together, and what the stream's own clock says it worked.
struct Accounts {
  std::array<double, kStreams> spans{}, busy{};
};

Accounts accounts_of_a_trace(const TinyModel& model, const Plan& plan) {
  // At a set speed, streams have clocks of their own. They begin when all is queued: otherwise a piece would also take as long
  // as the host thread pauses while it queues it.
  const Outcome outcome =
      run_pipeline(model, plan,
                   {.device = {.memory = kMiB * 64, .link_bytes_per_s = 1e7}, .hold = true, .trace = true});
  std::array<std::int64_t, kStreams> last{};
  Accounts found;
  for (const messages::LayerDoneT& order : outcome.layers) {
    std::uint64_t weights = 0, stores = 0;
    std::set<std::uint32_t> computed;
    for (const messages::Span& span : order.spans) {
      std::int64_t& end = last.at(span.stream());
      EXPECT_LE(end, span.begin_ns()) << "pieces of one stream follow one another";
      EXPECT_LE(span.begin_ns(), span.end_ns());
      end = span.end_ns();
      found.spans[span.stream()] += static_cast<double>(span.end_ns() - span.begin_ns());
      weights += span.kind() == messages::SpanKind::Weights ? span.bytes() : 0;
      stores += span.kind() == messages::SpanKind::Store ? span.bytes() : 0;
      if (span.kind() == messages::SpanKind::Attention) {
        computed.insert(span.mini_batch());
      }
    }
    EXPECT_EQ(weights, order.link->weights());
    EXPECT_EQ(stores, order.link->stores());
    const bool layer = order.stage > 0 && order.stage <= 3;
    EXPECT_EQ(computed.size(), layer ? order.mini_batches.size() : 0) << "stage " << order.stage;
    const std::array streams{order.copy_in.get(), order.compute.get(), order.copy_out.get()};
    for (std::size_t i = 0; i < streams.size(); ++i) {
      found.busy[i] += static_cast<double>(streams[i]->busy_ns());
    }
  }
  for (std::size_t i = 0; i < found.busy.size(); ++i) {
    EXPECT_GE(found.spans[i], found.busy[i] * 0.999) << "stream " << i;
  }
  return found;
}

TEST(Pipeline, ATraceAccountsForWhatEachStreamDid) {
  const TinyModel model(tiny_shape(), DType::float32, 6);
  const Plan plan{.sequences = random_sequences(model.shape, {37, 21, 60}, 7), .kind = mixed};
  EXPECT_TRUE(run_pipeline(model, plan).layers.front().spans.empty()) << "spans without a trace";
  const Accounts found = accounts_of_a_trace(model, plan);
  EXPECT_LT(found.spans[0] / found.busy[0] - 1, 0.001);
  EXPECT_LT(found.spans[2] / found.busy[2] - 1, 0.001);
}

// What host cores attend crosses the link as rows alone, and they report their own time and bytes.
TEST(Pipeline, ReportsWhatHostCoresDid) {
  const TinyModel model(tiny_shape(), DType::float32, 6);
  Plan plan{.sequences = random_sequences(model.shape, {37, 21, 60}, 7), .kind = all_kv};
  plan.prompt = 1;
  plan.on_host = [](std::uint32_t) { return true; };
  Setting setting;
  setting.limits.host_attention = true;
  setting.trace = true;
  setting.device.host_bytes_per_s = 1e8;
  constexpr std::uint64_t kRow = 24 * 4;  // of queries, keys, values, or attention's output
  std::uint64_t read = 0, rows = 0;
  for (const messages::LayerDoneT& order : run_pipeline(model, plan, setting).layers) {
    const bool layer = order.stage > 0 && order.stage <= 3;
    EXPECT_EQ(order.link->kv(), 0u);
    ASSERT_NE(order.host, nullptr);
    std::uint64_t here = 0, of_order = 0;
    for (const messages::MiniBatchReport& batch : order.mini_batches) {
      of_order += batch.rows();
    }
    for (const messages::Span& span : order.spans) {
      here += span.kind() == messages::SpanKind::HostAttention ? span.bytes() : 0;
    }
    EXPECT_EQ(order.host->bytes(), here);
    EXPECT_EQ(order.link->stores(), layer ? of_order * 3 * kRow : 0);
    EXPECT_EQ(order.host_rows_bytes, layer ? of_order * kRow : 0);
    EXPECT_GE(order.host->busy_ns() + 100, here * 10) << "but for rounding";
    read += here;
    rows += layer ? of_order : 0;
  }
  // Each row sees those before it and itself, in each of three layers.
  EXPECT_EQ(read, 3 * 2 * kRow * (37 * 38 + 21 * 22 + 60 * 61) / 2);
  EXPECT_EQ(rows, 3u * (37 + 21 + 60));
}

// Bytes that are copied within the device, into slots and out of new rows.
std::uint64_t copied_within_the_device(BlockKind (*kind)(std::uint32_t, std::uint32_t)) {
  const TinyModel model(tiny_shape(), DType::float32, 6);
  const Plan plan{.sequences = random_sequences(model.shape, {37, 21, 60}, 7), .kind = kind};
  Setting setting;
  setting.limits.gpu_act_blocks = setting.limits.gpu_kv_blocks = 64;
  setting.trace = true;
  std::uint64_t bytes = 0;
  for (const messages::LayerDoneT& order : run_pipeline(model, plan, setting).layers) {
    for (const messages::Span& span : order.spans) {
      const bool out = span.stream() == static_cast<std::uint8_t>(Stream::copy_out);
      const bool load = span.kind() == messages::SpanKind::Load;
      bytes += out && (load || span.kind() == messages::SpanKind::Store) ? span.bytes() : 0;
    }
    bytes -= order.link->stores();
  }
  return bytes;
}

TEST(Pipeline, KvBlocksOfTheDeviceAreReadAndWrittenWhereTheyLie) {
  EXPECT_EQ(copied_within_the_device(all_kv), 0u);
  EXPECT_GT(copied_within_the_device(all_act), 0u) << "ACT blocks are brought together for KV Gen";
}

// With link and arithmetic slowed down until both take the same time, a run takes little more than
// one of them: loads of the next mini-batch, layer and iteration pass behind the computation.
TEST(Pipeline, CopiesAndComputationOverlapAcrossLayersAndIterations) {
  const TinyModel model(tiny_shape(), DType::float32, 3);
  Plan plan = six_sequences(model.shape);
  plan.prompt = 1;     // token by token: there is context to load from the second on
  plan.per_batch = 6;  // one mini-batch: nothing but the next layer's loads can overlap
  Setting setting;
  setting.limits.resident_layers = 3;
  setting.hold = true;
  setting.device.link_bytes_per_s = 12e6;
  setting.device.compute_flops = 40e6;
  // On a busy machine a thread may stand still amid its work: not in each of several runs.
  double in = 0, compute = 0, best = 1e9;
  for (int attempt = 0; attempt < 8 && best >= 0.75; ++attempt) {
    in = compute = 0;
    double elapsed = 0;  // by the device's own clock
    for (const messages::LayerDoneT& order : run_pipeline(model, plan, setting).layers) {
      in += static_cast<double>(order.copy_in->busy_ns()) * 1e-9;
      compute += static_cast<double>(order.compute->busy_ns()) * 1e-9;
      elapsed += static_cast<double>(order.compute->busy_ns() + order.compute->wait_ns()) * 1e-9;
    }
    EXPECT_GT(in, 0.1);
    EXPECT_GT(compute, 0.1);
    best = std::min(best, elapsed / (in + compute));
  }
  EXPECT_LT(best, 0.75) << in << " s and " << compute << " s";
}

// One model and plan, and the run all others must equal bit by bit: KV blocks only, everything
// resident, one thread, nothing overlapping, one sequence in a mini-batch.
struct KindOfModel {
  ModelShape (*shape)();
  DType dtype;
  const char* name;
};
class SameBits : public testing::TestWithParam<KindOfModel> {
 protected:
  SameBits() : model_(GetParam().shape(), GetParam().dtype, 11), plan_(six_sequences(model_.shape)) {
    plan_.edits = true;
    Plan plan = plan_;
    plan.per_batch = 1;
    plan.seed = 0;
    Setting setting;
    setting.limits.resident_layers = 3;
    setting.device.synchronous = true;
    expected_ = run_pipeline(model_, plan, setting).rows;
    EXPECT_EQ(expected_.size(), 37u + 21 + 1 + 50 + 16 + 33);
  }

  // Packed matrices are unpacked before they are multiplied in every other run.
  void expect_same(const Plan& plan, Setting setting = {}) {
    setting.device.unpacks_first = runs_++ % 2 == 0;
    EXPECT_TRUE(run_pipeline(model_, plan, setting).rows == expected_);
  }

  const TinyModel model_;
  Plan plan_;
  decltype(Outcome::rows) expected_;
  int runs_ = 0;
};

TEST_P(SameBits, WhateverTheBlocksHold) {
  for (const auto& kind : {all_kv, all_act, mixed}) {
    Plan plan = plan_;
    plan.kind = kind;
    expect_same(plan);
  }
}

TEST_P(SameBits, HoweverMiniBatchesAreCut) {
  for (const std::int32_t per_batch : {1, 3, 8}) {
    for (const bool reversed : {false, true}) {
      Plan plan = plan_;
      plan.kind = mixed;
      plan.per_batch = per_batch;
      plan.reversed = reversed;
      plan.seed = static_cast<std::uint32_t>(per_batch);
      expect_same(plan);
    }
  }
}

TEST_P(SameBits, HoweverPromptsAreCut) {
  for (const std::int32_t chunk : {1, 5, 16, 17}) {
    for (const std::int32_t at_once : {1, 3}) {
      Plan plan = plan_;
      plan.kind = mixed;
      plan.chunk = chunk;
      plan.chunks_at_once = at_once;
      expect_same(plan);
    }
  }
}

TEST_P(SameBits, WhereverTheWeightsAre) {
  for (const std::int32_t resident : {0, 1, 2, 3}) {
    for (const bool late : {false, true}) {
      Setting setting;
      setting.limits.resident_layers = resident;
      setting.hold = true;
      Plan plan = plan_;
      plan.late_weights = late;
      expect_same(plan, setting);
    }
  }
}

TEST_P(SameBits, WhereverTheBlocksAre) {
  for (const std::int32_t here : {1, 5, 64}) {
    for (const std::uint64_t seed : {1, 2, 3}) {
      Setting setting;
      setting.limits.gpu_act_blocks = here;
      setting.limits.gpu_kv_blocks = seed == 1 ? 0 : here + 2;
      setting.device.jitter = seed;
      setting.hold = seed == 2;
      Plan plan = plan_;
      plan.kind = seed == 3 ? all_act : mixed;
      plan.chunk = 7;
      plan.chunks_at_once = 2;
      expect_same(plan, setting);
    }
  }
}

TEST_P(SameBits, WhereverSequencesAreAttended) {
  Setting setting;
  setting.limits.host_attention = true;
  setting.hold = true;
  setting.device.host_threads = 2;
  Plan plan = plan_;
  plan.on_host = [](std::uint32_t) { return true; };
  expect_same(plan, setting);
  plan.kind = mixed;
  plan.on_host = [](std::uint32_t request) { return request % 3 != 1; };
  setting.limits.gpu_act_blocks = setting.limits.gpu_kv_blocks = 3;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    setting.device.jitter = seed;
    setting.limits.resident_layers = static_cast<std::int32_t>(seed % 2);
    plan.late_weights = seed == 2;
    plan.per_batch = static_cast<std::int32_t>(seed);
    // With few rows prompts fill groups, and the queries of host cores' own group go first.
    setting.limits.max_mini_batch_rows = seed == 3 ? 24 : 128;
    plan.chunk = 7;
    plan.chunks_at_once = seed == 1 ? 1 : 3;
    expect_same(plan, setting);
  }
}

TEST_P(SameBits, WhereTheFirstBlocksAreMadeAgainFromTokens) {
  for (const std::uint32_t nowhere : {1u, 2u, 4u}) {
    for (const std::uint64_t seed : {1, 2, 3}) {
      Setting setting;
      setting.limits.gpu_kv_blocks = seed == 2 ? 9 : 0;
      setting.limits.max_rows = 600;
      setting.device.jitter = seed;
      setting.hold = seed == 2;
      Plan plan = plan_;
      plan.nowhere = nowhere;
      plan.kind = seed == 3 ? mixed : all_kv;
      plan.chunk = seed == 1 ? 1000 : 7;
      plan.per_batch = static_cast<std::int32_t>(seed);
      expect_same(plan, setting);
    }
  }
}

TEST_P(SameBits, HoweverManyThreadsAndLogitsRows) {
  for (const int threads : {1, 2, 3}) {
    Setting setting;
    setting.device.threads = threads;
    setting.limits.logits_rows = threads * 20 - 19;
    expect_same(plan_, setting);
  }
}

TEST_P(SameBits, WhateverOverlaps) {
  Plan plan = plan_;
  plan.kind = mixed;
  plan.chunk = 7;
  plan.chunks_at_once = 2;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Setting setting;
    setting.limits.resident_layers = static_cast<std::int32_t>(seed % 3);
    setting.limits.sides = seed <= 3 ? kFewestSides : kMostSides;
    setting.device.jitter = seed;
    setting.hold = seed % 2 == 0;
    expect_same(plan, setting);
  }
}

TEST_P(SameBits, OnALinkThatIsSlow) {
  Plan plan = plan_;
  plan.kind = mixed;
  Setting setting;
  setting.hold = true;
  setting.device.link_bytes_per_s = 200e6;
  expect_same(plan, setting);
  setting.device.link_bytes_per_s = 0;
  setting.device.compute_flops = 2e9;
  expect_same(plan, setting);
}

// Blocks before the window are given back, and hold other requests' rows soon: nothing reads them there.
TEST(Pipeline, BlocksThatNoLayerSeesAreNotNeeded) {
  const TinyModel model(windowed_shape(), DType::float16, 11);
  Plan plan = six_sequences(model.shape);
  plan.chunk = 7;
  plan.seed = 0;
  Setting setting;
  setting.device.synchronous = true;
  const auto expected = run_pipeline(model, plan, setting).rows;
  plan.window = 9;
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    Setting overlapped;
    overlapped.device.jitter = seed;
    overlapped.limits.gpu_kv_blocks = seed == 2 ? 5 : 0;
    overlapped.limits.host_attention = seed == 3;
    plan.on_host = nullptr;
    if (seed == 3) {
      plan.on_host = [](std::uint32_t request) { return request % 3 == 0; };
    }
    plan.seed = seed;
    plan.kind = seed % 3 == 0 ? all_kv : seed % 3 == 1 ? mixed : all_act;
    plan.per_batch = 1 + static_cast<std::int32_t>(seed % 3);
    EXPECT_TRUE(run_pipeline(model, plan, overlapped).rows == expected) << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Pipeline, SameBits,
                         testing::Values(KindOfModel{tiny_shape, DType::float32, "float32"},
                                         KindOfModel{tiny_shape, DType::float16, "float16"},
                                         KindOfModel{tiny_shape, DType::bfloat16, "bfloat16"},
                                         KindOfModel{rotary_shape, DType::float16, "rotary"},
                                         KindOfModel{packed_shape, DType::bfloat16, "packed"}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace poise::test
