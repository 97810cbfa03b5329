#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "kernels/philox.h"
#include "tests/kernels/tensors.h"

namespace poise::test {
namespace {

// `logits` and `edits` are copies: both are changed.
SampledRow sample(std::vector<float> logits, SampleRow row, std::vector<LogitEdit> edits = {}) {
  static cpu::Workers workers(1);
  SampledRow out;
  row.row = 0;
  row.edits = static_cast<std::int32_t>(edits.size());
  cpu::sample_tokens(
      {&out, &row, logits.data(), edits.data(), 1, static_cast<std::int32_t>(logits.size())},
      workers);
  return out;
}

constexpr SampleRow kGreedy{.temperature = 0, .top_p = 1, .logprobs = 0, .target = -1};

// Ids by logit, best first, the lower id first among equals.
std::vector<std::int32_t> ranking(const std::vector<float>& logits) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](std::int32_t a, std::int32_t b) {
    return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
  });
  return ids;
}

double log_mass(const std::vector<float>& logits) {
  const double maximum = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double mass = 0;
  for (const float x : logits) {
    mass += std::exp(static_cast<double>(x) - maximum);
  }
  return maximum + std::log(mass);
}

TEST(SampleTokens, GreedyTakesTheLowestIdAmongEqualMaxima) {
  for (const std::size_t vocabulary : {1, 2, 15, 16, 17, 509, 5000}) {
    std::vector<float> logits = normal_values(1, vocabulary);
    for (const std::size_t at : {vocabulary - 1, vocabulary / 2, std::size_t{0}}) {
      logits[at] = 9;
      EXPECT_EQ(sample(logits, kGreedy).token, static_cast<std::int32_t>(at));
    }
  }
}

TEST(SampleTokens, GreedyIsWhatAVanishingTemperatureMeans) {
  SampleRow row = kGreedy;
  row.temperature = 1e-6f;
  EXPECT_EQ(sample({1, 3, 3, 2}, row).token, 1);
}

TEST(SampleTokens, ReportsLogprobsOfTheModelBestFirst) {
  for (const std::size_t vocabulary : {1, 7, 100, 509, 50272}) {
    std::vector<float> logits = normal_values(2, vocabulary, 4);
    if (vocabulary > 50) {
      logits[40] = logits[20] = logits[30];  // ties go by id
      logits[41] = logits[21] = 30;
    }
    const std::vector<std::int32_t> ids = ranking(logits);
    const double log_total = log_mass(logits);
    for (const std::int32_t k : {0, 1, 5, 20}) {
      SampleRow row = kGreedy;
      row.logprobs = k;
      row.temperature = 0.3f;  // does not change what is reported
      const SampledRow out = sample(logits, row);
      EXPECT_NEAR(static_cast<double>(out.logprob),
                  static_cast<double>(logits[static_cast<std::size_t>(out.token)]) - log_total,
                  1e-5);
      ASSERT_EQ(out.top_count, std::min<std::int32_t>(k, static_cast<std::int32_t>(vocabulary)));
      for (std::int32_t i = 0; i < out.top_count; ++i) {
        const std::int32_t id = ids[static_cast<std::size_t>(i)];
        EXPECT_EQ(out.top_token[i], id) << i;
        EXPECT_NEAR(static_cast<double>(out.top_logprob[i]),
                    static_cast<double>(logits[static_cast<std::size_t>(id)]) - log_total, 1e-5);
      }
    }
  }
}

TEST(SampleTokens, ReportsATargetInsteadOfSampling) {
  SampleRow row = kGreedy;
  row.target = 2;
  row.temperature = 1;
  const SampledRow out = sample({0, 1, 2, 3}, row);
  EXPECT_EQ(out.token, 2);
  EXPECT_NEAR(out.logprob, 2 - log_mass({0, 1, 2, 3}), 1e-6);
}

TEST(SampleTokens, SaysMinusOneWhereALogitIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float broken : {std::nanf(""), -std::nanf(""), kInfinity, -kInfinity}) {
    for (const std::size_t at : {0, 17, 32}) {
      for (const float temperature : {0.0f, 1.0f}) {
        std::vector<float> logits = normal_values(3, 33);
        logits[at] = broken;
        SampleRow row = kGreedy;
        row.temperature = temperature;
        row.logprobs = 5;
        EXPECT_EQ(sample(logits, row).token, -1);
      }
    }
  }
}

TEST(SampleTokens, LeavesLogprobsOutUnlessAskedFor) {
  SampleRow row = kGreedy;
  row.logprobs = -1;
  const SampledRow out = sample({0, 5, 2}, row);
  EXPECT_EQ(out.token, 1);
  EXPECT_EQ(out.logprob, 0.0f);
  EXPECT_EQ(out.top_count, 0);
}

// What may be drawn, and with which probability, by sorting: the definition.
std::map<std::int32_t, double> distribution(const std::vector<float>& logits,
                                            const SampleRow& row) {
  const std::vector<std::int32_t> ids = ranking(logits);
  const auto weight = [&](std::int32_t id) {
    return std::exp(static_cast<double>(logits[static_cast<std::size_t>(id)] -
                                        logits[static_cast<std::size_t>(ids[0])]) /
                    static_cast<double>(row.temperature));
  };
  std::size_t kept = ids.size();
  while (kept > 1 && weight(ids[kept - 1]) < static_cast<double>(row.min_p)) {
    --kept;
  }
  if (row.top_k > 0) {
    kept = std::min(kept, static_cast<std::size_t>(row.top_k));
  }
  double total = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    total += weight(ids[i]);
  }
  double mass = 0;
  std::map<std::int32_t, double> result;
  for (std::size_t i = 0; i < kept; ++i) {
    if (i > 0 && row.top_p < 1 && mass >= static_cast<double>(row.top_p) * total) {
      break;
    }
    mass += weight(ids[i]);
    result[ids[i]] = weight(ids[i]);
  }
  for (auto& [id, share] : result) {
    share /= mass;
  }
  return result;
}

TEST(SampleTokens, DrawsFromTheCutDistributionAsOftenAsItSays) {
  struct Setting {
    std::size_t vocabulary;
    float temperature;
    std::int32_t top_k;
    float top_p;
    float min_p = 0;
  };
  for (const Setting& s :
       {Setting{5, 1, 0, 1}, Setting{40, 0.7f, 0, 1}, Setting{40, 1.5f, 7, 1},
        Setting{40, 1, 0, 0.8f}, Setting{600, 1, 30, 0.5f}, Setting{600, 2, 0, 0.999f},
        Setting{40, 1, 1, 1}, Setting{40, 1, 0, 1e-6f}, Setting{40, 1, 400, 1},
        Setting{40, 1, 0, 1, 0.05f}, Setting{600, 0.7f, 5, 1, 0.1f}, Setting{600, 2, 400, 1, 0.2f},
        Setting{600, 2, 0, 0.7f, 0.1f}, Setting{40, 1, 0, 1, 1}}) {
    SCOPED_TRACE(testing::Message()
                 << s.vocabulary << " tokens, temperature " << s.temperature << ", top_k "
                 << s.top_k << ", top_p " << s.top_p << ", min_p " << s.min_p);
    std::vector<float> logits = normal_values(4, s.vocabulary, 2);
    SampleRow row{.temperature = s.temperature,
                  .top_p = s.top_p,
                  .top_k = s.top_k,
                  .seed = 7,
                  .logprobs = -1,
                  .target = -1,
                  .min_p = s.min_p};
    const std::map<std::int32_t, double> expected = distribution(logits, row);
    constexpr int kDraws = 4000;
    std::map<std::int32_t, int> drawn;
    std::vector<SampleRow> rows(kDraws, row);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].step = i;
    }
    std::vector<SampledRow> out(kDraws);
    cpu::Workers workers(2);
    cpu::sample_tokens({out.data(), rows.data(), logits.data(), nullptr, kDraws,
                        static_cast<std::int32_t>(s.vocabulary)},
                       workers);
    for (const SampledRow& one : out) {
      ASSERT_TRUE(expected.count(one.token) == 1) << one.token;
      ++drawn[one.token];
    }
    // Fixed seeds: these deviations are numbers, not chances. Five standard deviations.
    for (const auto& [id, share] : expected) {
      const double mean = share * kDraws;
      EXPECT_NEAR(drawn[id], mean, 5 * std::sqrt(mean * (1 - share)) + 1) << id;
    }
  }
}

TEST(SampleTokens, KeepsTheLowerIdsAmongEqualsAtACut) {
  const std::vector<float> logits = {1, 2, 2, 2, 2, 0};
  std::set<std::int32_t> by_count;
  std::set<std::int32_t> by_mass;
  for (std::uint64_t step = 0; step < 200; ++step) {
    SampleRow row = kGreedy;
    row.temperature = 1;
    row.step = step;
    row.top_k = 3;
    by_count.insert(sample(logits, row).token);
    row.top_k = 0;
    row.top_p = 0.4f;  // two of the four, each has 0.22
    by_mass.insert(sample(logits, row).token);
  }
  EXPECT_EQ(by_count, (std::set<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(by_mass, (std::set<std::int32_t>{1, 2}));
}

TEST(SampleTokens, IsAFunctionOfItsRowSeedAndStepAlone) {
  constexpr std::int32_t kVocabulary = 3001;
  constexpr std::int32_t kRows = 24;
  std::vector<float> logits = normal_values(5, kRows * kVocabulary, 2);
  std::vector<SampleRow> rows;
  for (std::int32_t r = 0; r < kRows; ++r) {
    rows.push_back({.row = kRows - 1 - r,
                    .temperature = 0.2f * static_cast<float>(r % 7),
                    .top_p = r % 3 == 0 ? 0.9f : 1.0f,
                    .top_k = r % 2 == 0 ? 50 : 0,
                    .seed = 100 + static_cast<std::uint64_t>(r),
                    .step = static_cast<std::uint64_t>(r * r),
                    .logprobs = r % 21,
                    .target = -1});
  }
  const auto run = [&](cpu::Workers& workers, std::int32_t first, std::int32_t count) {
    std::vector<SampledRow> out(static_cast<std::size_t>(count));
    cpu::sample_tokens(
        {out.data(), rows.data() + first, logits.data(), nullptr, count, kVocabulary}, workers);
    return out;
  };
  cpu::Workers one(1);
  const std::vector<SampledRow> expected = run(one, 0, kRows);
  cpu::Workers workers(3);
  for (const cpu::Isa isa : cpu::available_isas()) {
    under(isa, [&] {
      const std::vector<SampledRow> whole = run(workers, 0, kRows);
      EXPECT_EQ(std::memcmp(whole.data(), expected.data(), sizeof(SampledRow) * kRows), 0)
          << cpu::name_of(isa);
      for (std::int32_t r = 0; r < kRows; ++r) {
        EXPECT_EQ(run(workers, r, 1)[0].token, expected[static_cast<std::size_t>(r)].token);
      }
    });
  }
}

// ---- edits

constexpr float kBars = -std::numeric_limits<float>::infinity();

// The definition, in double.
std::vector<float> edited(std::vector<float> logits, const std::vector<LogitEdit>& edits,
                          bool only_edited) {
  const std::vector<float> before = logits;
  if (only_edited) {
    std::ranges::fill(logits, kBars);
  }
  for (const LogitEdit& edit : edits) {
    const auto at = static_cast<std::size_t>(edit.token);
    const double biased = static_cast<double>(before[at]) + static_cast<double>(edit.bias);
    const auto factor = static_cast<double>(edit.factor);
    logits[at] = static_cast<float>((biased > 0 ? biased / factor : biased * factor) -
                                    static_cast<double>(edit.minus));
  }
  return logits;
}

TEST(SampleTokens, EditsChangeWhatIsChosenAndNotWhatIsReported) {
  const std::vector<float> logits = {1, 4, 3, -1, 2};
  SampleRow row = kGreedy;
  row.logprobs = 3;
  const SampledRow plain = sample(logits, row);
  const auto chosen = [&](const std::vector<LogitEdit>& edits) {
    const SampledRow out = sample(logits, row, edits);
    EXPECT_EQ(out.top_token[0], 1);
    EXPECT_EQ(std::memcmp(out.top_logprob, plain.top_logprob, sizeof out.top_logprob), 0);
    EXPECT_NEAR(out.logprob,
                static_cast<double>(logits[static_cast<std::size_t>(out.token)]) - log_mass(logits),
                1e-6);
    return out.token;
  };
  EXPECT_EQ(chosen({}), 1);
  EXPECT_EQ(chosen({{1, kBars, 1, 0}}), 2);
  EXPECT_EQ(chosen({{1, 0, 1, 1.5f}}), 2);
  EXPECT_EQ(chosen({{1, 0, 2, 0}, {2, 0, 1, 0}}), 2);
  EXPECT_EQ(chosen({{3, 5.5f, 1, 0}}), 3);
  EXPECT_EQ(chosen({{3, 5.5f, 1.2f, 0}}), 1);
  EXPECT_EQ(chosen({{0, 3, 1, 0}}), 0);  // equals: the lower id
  row.only_edited = 1;
  EXPECT_EQ(chosen({{0, 0, 1, 0}, {3, 0, 1, 0}, {4, 0, 1, 0}}), 4);
  EXPECT_EQ(chosen({{3, 0, 1, 0}}), 3);
}

TEST(SampleTokens, TemperatureAndCutsSeeTheEditedLogits) {
  constexpr std::int32_t kVocabulary = 700;
  const std::vector<float> logits = normal_values(6, kVocabulary, 3);
  std::vector<LogitEdit> edits;
  for (std::int32_t token = 0; token < kVocabulary; token += 1 + token % 3) {
    edits.push_back({token, token % 7 == 0 ? kBars : static_cast<float>(token % 5) - 2,
                     0.5f + static_cast<float>(token % 4), static_cast<float>(token % 3) - 1});
  }
  for (const bool only_edited : {false, true}) {
    const std::vector<float> after = edited(logits, edits, only_edited);
    for (const auto& [top_k, top_p, min_p] : {std::tuple{0, 1.0f, 0.0f},
                                              {20, 1.0f, 0.0f},
                                              {0, 0.8f, 0.0f},
                                              {0, 1.0f, 0.05f},
                                              {690, 0.9f, 0.01f}}) {
      SampleRow row{.temperature = 0.9f,
                    .top_p = top_p,
                    .top_k = top_k,
                    .seed = 3,
                    .logprobs = -1,
                    .target = -1,
                    .min_p = min_p,
                    .only_edited = only_edited ? 1 : 0};
      for (row.step = 0; row.step < 200; ++row.step) {
        SampleRow plain = row;
        plain.only_edited = 0;
        // Barred tokens are no finite logits; far below all others they are as impossible.
        std::vector<float> finite = after;
        std::ranges::replace(finite, kBars, -1e30f);
        ASSERT_EQ(sample(logits, row, edits).token, sample(finite, plain).token)
            << top_k << ' ' << top_p << ' ' << min_p << " step " << row.step;
      }
    }
  }
}

// Behind `edits`, in whole edits, the mask that allows these tokens.
std::vector<LogitEdit> with_mask(std::vector<LogitEdit> edits,
                                 const std::set<std::int32_t>& allowed, std::int32_t vocabulary) {
  std::vector<std::uint32_t> words(static_cast<std::size_t>(vocabulary + 127) / 128 * 4);
  for (const std::int32_t token : allowed) {
    words[static_cast<std::size_t>(token) / 32] |= std::uint32_t{1} << (token % 32);
  }
  const std::size_t first = edits.size();
  edits.resize(first + words.size() / 4);
  std::memcpy(&edits[first], words.data(), words.size() * 4);
  return edits;
}

SampledRow sample_masked(const std::vector<float>& logits, SampleRow row,
                         const std::vector<LogitEdit>& edits,
                         const std::set<std::int32_t>& allowed) {
  static cpu::Workers workers(1);
  std::vector<float> changed = logits;
  std::vector<LogitEdit> all = with_mask(edits, allowed, static_cast<std::int32_t>(logits.size()));
  SampledRow out;
  row.row = 0;
  row.edits = static_cast<std::int32_t>(edits.size());
  row.masked = 1;
  cpu::sample_tokens(
      {&out, &row, changed.data(), all.data(), 1, static_cast<std::int32_t>(changed.size())},
      workers);
  return out;
}

TEST(SampleTokens, AMaskBarsTokensAndChangesNothingThatIsReported) {
  SampleRow row = kGreedy;
  row.logprobs = 2;
  for (const std::int32_t vocabulary : {1, 5, 31, 32, 33, 64, 127, 128, 129, 1000}) {
    const std::vector<float> logits = normal_values(7, static_cast<std::size_t>(vocabulary), 3);
    const SampledRow plain = sample(logits, row);
    for (const std::int32_t step : {1, 2, 3, 40}) {
      std::set<std::int32_t> allowed;
      for (std::int32_t token = (vocabulary - 1) % step; token < vocabulary; token += step) {
        allowed.insert(token);
      }
      const std::int32_t best = *std::ranges::max_element(
          allowed, {}, [&](std::int32_t id) { return logits[static_cast<std::size_t>(id)]; });
      const SampledRow out = sample_masked(logits, row, {}, allowed);
      EXPECT_EQ(out.token, best) << vocabulary << ' ' << step;
      EXPECT_NEAR(out.logprob,
                  static_cast<double>(logits[static_cast<std::size_t>(best)]) - log_mass(logits),
                  1e-5);
      EXPECT_EQ(std::memcmp(out.top_logprob, plain.top_logprob, sizeof out.top_logprob), 0);
    }
  }
}

// The mask comes behind the edits, and all that is drawn behind both.
TEST(SampleTokens, TemperatureAndCutsSeeTheMask) {
  constexpr std::int32_t kVocabulary = 300;
  const std::vector<float> logits = normal_values(9, kVocabulary, 2);
  const std::vector<LogitEdit> edits = {{3, 9, 1, 0}, {10, 4, 1, 0}, {40, 5, 2, 0}};
  std::set<std::int32_t> allowed;
  for (std::int32_t token = 4; token < kVocabulary; token += 6) {
    allowed.insert(token);  // 10 and 40 among them, 3 not
  }
  std::vector<float> finite = edited(logits, edits, false);
  for (std::int32_t token = 0; token < kVocabulary; ++token) {
    finite[static_cast<std::size_t>(token)] =
        allowed.contains(token) ? finite[static_cast<std::size_t>(token)] : -1e30f;
  }
  std::set<std::int32_t> drawn;
  for (const auto& [top_k, top_p, min_p] :
       {std::tuple{0, 1.0f, 0.0f}, {8, 1.0f, 0.0f}, {0, 0.8f, 0.0f}, {0, 1.0f, 0.05f}}) {
    SampleRow row{.temperature = 2,
                  .top_p = top_p,
                  .top_k = top_k,
                  .seed = 5,
                  .logprobs = -1,
                  .target = -1,
                  .min_p = min_p};
    for (row.step = 0; row.step < 200; ++row.step) {
      const std::int32_t token = sample_masked(logits, row, edits, allowed).token;
      ASSERT_EQ(token, sample(finite, row).token) << top_k << ' ' << top_p << ' ' << row.step;
      drawn.insert(token);
    }
  }
  EXPECT_GT(drawn.size(), 5u);
}

TEST(SampleTokens, SaysWhereTheMaskBarsWhatEditsLeave) {
  const SampleRow row = kGreedy;
  EXPECT_EQ(sample_masked({1, 2, 3}, row, {}, {}).token, kAllBarred);
  EXPECT_EQ(sample_masked({1, 2, 3}, row, {{1, kBars, 1, 0}}, {1}).token, kAllBarred);
  EXPECT_EQ(sample_masked({1, 2, 3}, row, {{1, kBars, 1, 0}}, {0, 1}).token, 0);
}

TEST(SampleTokens, SaysWhereEveryTokenIsBarred) {
  SampleRow row = kGreedy;
  for (const float temperature : {0.0f, 1.0f}) {
    row.temperature = temperature;
    EXPECT_EQ(sample({1, 2}, row, {{0, kBars, 1, 0}, {1, kBars, 1, 0}}).token, kAllBarred);
    row.only_edited = 1;
    EXPECT_EQ(sample({1, 2}, row, {{1, kBars, 1, 0}}).token, kAllBarred);
    EXPECT_EQ(sample({1, 2}, row).token, kAllBarred);
    EXPECT_EQ(sample({1, std::nanf("")}, row, {{1, kBars, 1, 0}}).token, kNotFinite);
    row.only_edited = 0;
  }
}

TEST(SampleTokens, EditsBeyondFloatsRangeStayNumbers) {
  SampleRow row = kGreedy;
  EXPECT_EQ(sample({1, 2, 3}, row, {{1, 0, 1e-38f, 0}, {2, 0, 1, 0}}).token, 1);
  row.temperature = 1;
  row.top_p = 0.9f;
  EXPECT_EQ(sample({1, 2, 3}, row, {{1, 0, 1e-38f, -2e38f}}).token, 1);
}

// From the known-answer file that the authors of Random123 publish.
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(philox({{0, 0, 0, 0}}, {{0, 0}}),
            (PhiloxCounter{{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}}));
  EXPECT_EQ(
      philox({{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}}, {{0xffffffffu, 0xffffffffu}}),
      (PhiloxCounter{{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}}));
  EXPECT_EQ(
      philox({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, {{0xa4093822u, 0x299f31d0u}}),
      (PhiloxCounter{{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}}));
}

TEST(Philox, UniformStaysBelowOne) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const double x = uniform(seed, seed << 33);
    ASSERT_GE(x, 0.0);
    ASSERT_LT(x, 1.0);
  }
}

}  // namespace
}  // namespace poise::test
