#include "kernels/cuda/cublas_lt.h"

#include <dlfcn.h>

#include <array>
#include <cstdlib>

#include "common/trouble.h"

namespace poise::cuda::lt {
namespace {

constexpr const char* kLibrary = "libcublasLt.so.13";

void* open_library() {
  const char* folder = std::getenv("POISE_CUBLAS");
  const std::array<std::string, 3> places{
      kLibrary, folder != nullptr ? fmt::format("{}/{}", folder, kLibrary) : std::string(),
      fmt::format("/usr/local/cuda/lib64/{}", kLibrary)};
  std::string said;
  for (const std::string& place : places) {
    if (place.empty()) {
      continue;
    }
    if (void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return library;
    }
    const char* error = dlerror();
    said += fmt::format("{}{}", said.empty() ? "" : "; ", error != nullptr ? error : "no reason");
  }
  fail(
      "cuBLAS is needed for --device cuda and is not found ({}): install CUDA 13's cuBLAS, or name "
      "its folder in POISE_CUBLAS",
      said);
}

class Loaded {
 public:
  Loaded() : library_(open_library()) {
    find(&functions.create, "cublasLtCreate");
    find(&functions.destroy, "cublasLtDestroy");
    find(&functions.get_version, "cublasLtGetVersion");
    find(&functions.matmul, "cublasLtMatmul");
    find(&functions.desc_create, "cublasLtMatmulDescCreate");
    find(&functions.desc_destroy, "cublasLtMatmulDescDestroy");
    find(&functions.desc_set, "cublasLtMatmulDescSetAttribute");
    find(&functions.layout_create, "cublasLtMatrixLayoutCreate");
    find(&functions.layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(&functions.layout_set, "cublasLtMatrixLayoutSetAttribute");
    find(&functions.preference_create, "cublasLtMatmulPreferenceCreate");
    find(&functions.preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(&functions.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(&functions.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(&functions.algo_check, "cublasLtMatmulAlgoCheck");
    find(&functions.algo_get, "cublasLtMatmulAlgoConfigGetAttribute");
  }

  Functions functions{};

 private:
  template <typename Function>
  void find(Function* function, const char* name) {
    *function = reinterpret_cast<Function>(dlsym(library_, name));
    if (*function == nullptr) {
      fail("{} has no {}: it is not a cuBLASLt this program knows", kLibrary, name);
    }
  }

  void* library_;
};

}  // namespace

const Functions& functions() {
  static const Loaded loaded;
  return loaded.functions;
}

void lt_check(Status status, const char* what) {
  if (status != kSuccess) {
    fail(Exit::interrupted, "cuBLAS: {} failed with status {}", what, status);
  }
}

}  // namespace poise::cuda::lt
