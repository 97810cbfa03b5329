cmake_minimum_required(VERSION 3.25)
# cmake -DROOT=… -DOUT=… -P: writes a header with a digest of the sources whose work a profile measures.
file(GLOB_RECURSE sources ${ROOT}/kernels/* ${ROOT}/gpu_executor/* ${ROOT}/planner/profile/*)
list(FILTER sources INCLUDE REGEX "\\.(h|cpp|cu|cuh)$")
list(SORT sources)
set(digests "")
foreach(source ${sources})
  file(SHA256 ${source} digest)
  string(APPEND digests "${digest}\n")
endforeach()
string(SHA256 digest "${digests}")
string(SUBSTRING ${digest} 0 8 digest)
file(CONFIGURE OUTPUT ${OUT} CONTENT
     "#pragma once\ninline constexpr const char* kDigestOfWork = \"@digest@\";\n" @ONLY)
