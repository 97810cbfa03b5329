// Sampling on the GPU, held to the CPU's.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#include "tests/kernels/cuda/on_device.h"

namespace poise::test {
namespace {

class CudaSampleTokens : public CudaTest {};

std::vector<SampledRow> sample(const std::vector<float>& logits, std::int32_t vocabulary,
                               const std::vector<SampleRow>& rows,
                               const std::vector<LogitEdit>& edits = {}) {
  const OnDevice<float> logits_there(logits);
  const OnDevice<SampleRow> rows_there(rows);
  const OnDevice<LogitEdit> edits_there(edits.empty() ? std::vector<LogitEdit>(1) : edits);
  const OnDevice<SampledRow> out(rows.size());
  cuda::sample_tokens({out.get(), rows_there.get(), logits_there.get(), edits_there.get(),
                       static_cast<std::int32_t>(rows.size()), vocabulary},
                      nullptr);
  return out.read();
}
SampledRow sample(const std::vector<float>& logits, SampleRow row) {
  row.row = 0;
  return sample(logits, static_cast<std::int32_t>(logits.size()), {row})[0];
}
// `logits` and `edits` are copies: both are changed.
std::vector<SampledRow> sample_on_cpu(std::vector<float> logits, std::int32_t vocabulary,
                                      const std::vector<SampleRow>& rows,
                                      std::vector<LogitEdit> edits = {}) {
  cpu::Workers workers(2);
  std::vector<SampledRow> out(rows.size());
  cpu::sample_tokens({out.data(), rows.data(), logits.data(), edits.data(),
                      static_cast<std::int32_t>(rows.size()), vocabulary},
                     workers);
  return out;
}

constexpr SampleRow kGreedy{.temperature = 0, .top_p = 1, .logprobs = 0, .target = -1};

TEST_F(CudaSampleTokens, GreedyTakesTheLowestIdAmongEqualMaxima) {
  for (const std::size_t vocabulary : {1, 2, 31, 32, 33, 1023, 1024, 1025, 8192, 8193, 50272}) {
    std::vector<float> logits = normal_values(1, vocabulary);
    for (const std::size_t at : {vocabulary - 1, vocabulary / 2, std::size_t{0}}) {
      logits[at] = 9;
      EXPECT_EQ(sample(logits, kGreedy).token, static_cast<std::int32_t>(at)) << vocabulary;
    }
  }
  EXPECT_EQ(sample({-1, -0.0f, 0.0f}, kGreedy).token, 1);
  EXPECT_EQ(sample({-1, 0.0f, -0.0f}, kGreedy).token, 1);
}

TEST_F(CudaSampleTokens, SaysMinusOneWhereALogitIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float broken : {std::nanf(""), -std::nanf(""), kInfinity, -kInfinity}) {
    for (const std::size_t at : {0, 17, 1032}) {
      for (const float temperature : {0.0f, 1.0f}) {
        std::vector<float> logits = normal_values(3, 1033);
        logits[at] = broken;
        SampleRow row = kGreedy;
        row.temperature = temperature;
        row.logprobs = 5;
        const SampledRow out = sample(logits, row);
        EXPECT_EQ(out.token, -1);
        EXPECT_EQ(out.top_count, 0);
      }
    }
  }
}

TEST_F(CudaSampleTokens, ReportsLogprobsAsTheCpuDoes) {
  for (const std::size_t vocabulary : {1, 7, 100, 1025, 50272}) {
    std::vector<float> logits = normal_values(2, vocabulary, 4);
    if (vocabulary > 50) {
      logits[40] = logits[20] = logits[30];  // ties go by id
      logits[41] = logits[21] = 30;
    }
    std::vector<SampleRow> rows;
    for (const std::int32_t k : {-1, 0, 1, 2, 5, 20, 25}) {
      for (const std::int32_t target : {-1, static_cast<std::int32_t>(vocabulary) - 1}) {
        SampleRow row = kGreedy;
        row.logprobs = k;
        row.target = target;
        rows.push_back(row);
      }
    }
    const auto count = static_cast<std::int32_t>(vocabulary);
    const std::vector<SampledRow> got = sample(logits, count, rows);
    const std::vector<SampledRow> want = sample_on_cpu(logits, count, rows);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      SCOPED_TRACE(testing::Message() << vocabulary << " tokens, best " << rows[r].logprobs
                                      << ", target " << rows[r].target);
      EXPECT_EQ(got[r].token, want[r].token);
      EXPECT_NEAR(got[r].logprob, want[r].logprob, 1e-5);
      ASSERT_EQ(got[r].top_count, want[r].top_count);
      for (std::int32_t i = 0; i < kMaxLogprobs; ++i) {
        EXPECT_EQ(got[r].top_token[i], want[r].top_token[i]) << i;
        EXPECT_NEAR(got[r].top_logprob[i], want[r].top_logprob[i], 1e-5) << i;
      }
    }
  }
}

TEST_F(CudaSampleTokens, BestOfEqualsAreTheLowestIds) {
  SampleRow row = kGreedy;
  row.logprobs = 20;
  const SampledRow out = sample(std::vector<float>(5000, 1.5f), row);
  for (std::int32_t i = 0; i < 20; ++i) {
    EXPECT_EQ(out.top_token[i], i);
    EXPECT_NEAR(out.top_logprob[i], -std::log(5000.0), 1e-5);
  }
}

TEST_F(CudaSampleTokens, DrawsTheCpusTokens) {
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
        Setting{1, 1, 0, 0.5f}, Setting{5001, 1, 50, 0.9f}, Setting{5001, 5, 0, 0.95f},
        Setting{40, 1, 0, 1, 0.05f}, Setting{600, 0.7f, 5, 1, 0.1f}, Setting{600, 2, 400, 1, 0.2f},
        Setting{5001, 2, 0, 0.7f, 0.1f}, Setting{40, 1, 0, 1, 1}}) {
    SCOPED_TRACE(testing::Message()
                 << s.vocabulary << " tokens, temperature " << s.temperature << ", top_k "
                 << s.top_k << ", top_p " << s.top_p << ", min_p " << s.min_p);
    const std::vector<float> logits = normal_values(4, s.vocabulary, 2);
    std::vector<SampleRow> rows(1000, {.temperature = s.temperature,
                                       .top_p = s.top_p,
                                       .top_k = s.top_k,
                                       .seed = 7,
                                       .logprobs = -1,
                                       .target = -1,
                                       .min_p = s.min_p});
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].step = i;
    }
    const auto count = static_cast<std::int32_t>(s.vocabulary);
    const std::vector<SampledRow> got = sample(logits, count, rows);
    const std::vector<SampledRow> want = sample_on_cpu(logits, count, rows);
    int others = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      others += got[i].token != want[i].token ? 1 : 0;
    }
    // Masses are rounded differently: each of the borders between tokens may lie some 1e-7 aside, and
    // a draw fall on its other side.
    EXPECT_LE(others, 1 + static_cast<int>(s.vocabulary) / 500);
  }
}

// Each row of logits with edits of its own: of few tokens or many, some barred, some rows of them alone. Every other row has a mask too.
TEST_F(CudaSampleTokens, EditsAndMasksLogitsAsTheCpuDoes) {
  constexpr float kBars = -std::numeric_limits<float>::infinity();
  constexpr std::int32_t kVocabulary = 5003;
  constexpr std::int32_t kRows = 96;
  const std::vector<float> logits = normal_values(8, std::size_t{kRows} * kVocabulary, 3);
  std::vector<SampleRow> rows;
  std::vector<LogitEdit> edits;
  for (std::int32_t r = 0; r < kRows; ++r) {
    const auto first = static_cast<std::int32_t>(edits.size());
    for (std::int32_t token = r % 11; token < kVocabulary; token += 1 + r * 17 % 900) {
      edits.push_back({token,
                       (token + r) % 7 == 0 || r == 5 ? kBars : static_cast<float>(token % 5) - 2,
                       0.5f + static_cast<float>(token % 4), static_cast<float>(token % 3) - 1});
    }
    rows.push_back({.row = r,
                    .temperature = 0.3f * static_cast<float>(r % 4),
                    .top_p = r % 5 == 0 ? 0.9f : 1.0f,
                    .top_k = r % 3 == 0 ? 50 : 0,
                    .seed = 40,
                    .step = static_cast<std::uint64_t>(r),
                    .logprobs = r % 6 - 1,
                    .target = -1,
                    .min_p = r % 7 == 0 ? 0.02f : 0.0f,
                    .only_edited = r % 5 == 0 ? 1 : 0,
                    .first_edit = first,
                    .edits = static_cast<std::int32_t>(edits.size()) - first,
                    .masked = r % 2});
    if (r % 2 == 1) {  // every third token and some whole words, in whole edits
      std::vector<std::uint32_t> mask((kVocabulary + 127) / 128 * 4);
      for (std::size_t word = 0; word < mask.size(); ++word) {
        mask[word] = word % 5 == 0 ? ~0u : word % 7 == 0 ? 0u : 0x49249249u << (r % 3);
      }
      edits.resize(edits.size() + mask.size() / 4);
      std::memcpy(&edits[edits.size() - mask.size() / 4], mask.data(), mask.size() * 4);
    }
  }
  const std::vector<SampledRow> got = sample(logits, kVocabulary, rows, edits);
  const std::vector<SampledRow> want = sample_on_cpu(logits, kVocabulary, rows, edits);
  EXPECT_EQ(want[5].token, kAllBarred);  // only edited tokens, all of them barred
  int others = 0;
  for (std::size_t r = 0; r < kRows; ++r) {
    others += got[r].token != want[r].token ? 1 : 0;
    if (rows[r].temperature == 0) {
      EXPECT_EQ(got[r].token, want[r].token) << r;
    }
    ASSERT_EQ(got[r].top_count, want[r].top_count) << r;
    if (got[r].token == want[r].token) {
      EXPECT_NEAR(got[r].logprob, want[r].logprob, 1e-5) << r;
    }
    for (std::int32_t i = 0; i < got[r].top_count; ++i) {
      EXPECT_EQ(got[r].top_token[i], want[r].top_token[i]) << r;
      EXPECT_NEAR(got[r].top_logprob[i], want[r].top_logprob[i], 1e-5) << r;
    }
  }
  EXPECT_LE(others, 2);  // masses are rounded differently (above)
}

TEST_F(CudaSampleTokens, KeepsTheLowerIdsAmongEqualsAtACut) {
  const std::vector<float> logits = {1, 2, 2, 2, 2, 0};
  std::vector<SampleRow> rows;
  for (std::uint64_t step = 0; step < 200; ++step) {
    rows.push_back(
        {.temperature = 1, .top_p = 1, .top_k = 3, .step = step, .logprobs = -1, .target = -1});
  }
  const auto drawn = [&] {
    std::set<std::int32_t> ids;
    for (const SampledRow& row : sample(logits, 6, rows)) {
      ids.insert(row.token);
    }
    return ids;
  };
  EXPECT_EQ(drawn(), (std::set<std::int32_t>{1, 2, 3}));
  for (SampleRow& row : rows) {
    row.top_k = 0;
    row.top_p = 0.4f;  // two of the four, each has 0.22
  }
  EXPECT_EQ(drawn(), (std::set<std::int32_t>{1, 2}));
  for (SampleRow& row : rows) {
    row.top_k = 2;
    row.top_p = 0.5f;  // one of the two
  }
  EXPECT_EQ(drawn(), (std::set<std::int32_t>{1}));
}

TEST_F(CudaSampleTokens, IsAFunctionOfItsRowSeedAndStepAlone) {
  constexpr std::int32_t kVocabulary = 3001;  // rows of every alignment
  constexpr std::size_t kRows = 24;
  const std::vector<float> logits = normal_values(5, kRows * kVocabulary, 2);
  std::vector<SampleRow> rows;
  for (std::size_t r = 0; r < kRows; ++r) {
    rows.push_back({.row = static_cast<std::int32_t>(kRows - 1 - r),
                    .temperature = 0.2f * static_cast<float>(r % 7),
                    .top_p = r % 3 == 0 ? 0.9f : 1.0f,
                    .top_k = r % 2 == 0 ? 50 : 0,
                    .seed = 100 + r,
                    .step = r * r,
                    .logprobs = static_cast<std::int32_t>(r % 21),
                    .target = -1});
  }
  const std::vector<SampledRow> together = sample(logits, kVocabulary, rows);
  for (std::size_t r = 0; r < kRows; ++r) {
    // The row alone, first of its array.
    const auto from = logits.begin() + static_cast<std::ptrdiff_t>(kRows - 1 - r) * kVocabulary;
    const SampledRow alone = sample(std::vector<float>(from, from + kVocabulary), rows[r]);
    EXPECT_EQ(std::memcmp(&alone, &together[r], sizeof alone), 0) << r;
  }
}

}  // namespace
}  // namespace poise::test
