#include "loader/loading_speed.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "common/trouble.h"
#include "tests/support/source_folder.h"

namespace poise {
namespace {

TEST(LoadingSpeed, EveryFileIsReadAndEveryRateIsMeasured) {
  const std::filesystem::path model = source_folder() / "launch" / "demo" / "model";
  const LoadingSpeed speed = measure_loading(model);
  ASSERT_EQ(speed.files.size(), 1u);
  const FileSpeed& file = speed.files[0];
  EXPECT_EQ(file.name, "model.safetensors");
  EXPECT_EQ(static_cast<std::uint64_t>(file.size.n), std::filesystem::file_size(model / file.name));
  EXPECT_EQ(file.measured, file.size);
  EXPECT_GT(file.read, 0);
  EXPECT_GE(file.cached.value_or(0), 0);
  EXPECT_LE(file.cached.value_or(1), 1);
  EXPECT_GT(file.disk.value_or(1), 0);
  EXPECT_GT(speed.digest, 0);
  EXPECT_GT(speed.memory_copied, 0);
  EXPECT_GT(speed.memory_read, speed.digest / 2);
  EXPECT_NE(to_json(speed).find(R"("name":"model.safetensors")"), std::string::npos);
}

TEST(LoadingSpeed, ADirectoryWithoutACheckpointIsRefused) {
  EXPECT_THROW(measure_loading(std::filesystem::temp_directory_path() / "no-such-model"), Failure);
}

}  // namespace
}  // namespace poise
