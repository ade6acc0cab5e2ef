#!/usr/bin/env bash
# Builds the llama.cpp that Rekindle is made for, with the GPU code that the package on the index lacks.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: build-llama.sh [--cuda | --vulkan | --metal | --cpu] [options]

Builds llama.cpp's shared libraries from the source archive of the pinned xllamacpp package, and
prints the REKINDLE_LLAMA_LIB line to put into the environment of `rekindle serve`.
`rekindle build-gpu` runs this script, checks the machine before and remembers the library.

  --cuda            for NVIDIA GPUs (the default on Linux); needs CUDA's nvcc
  --vulkan          for GPUs with a Vulkan driver; needs its headers and glslc
  --metal           for Apple's GPUs (the default on macOS)
  --cpu             without a GPU
  --arch LIST       CUDA architectures, such as 90 or "86;89" (default: native, those of this machine)
  --server          also build llama-server, to compare with
  --source PATH     archive or folder with the sources, for a machine without a network:
                    xllamacpp-VERSION.tar.gz, what --pack wrote, or a llama.cpp folder
  --out FOLDER      where to build (default: build/llama)
  --jobs N          compilers at a time (default: the number of cores)
  --configure       stop before compiling
  --pack FILE       build nothing: write the sources that a build needs into FILE (.tar.xz: 3 MB)
TEXT
}

fail() {
  echo "build-llama: $*" >&2
  exit 1
}

need() {
  command -v "$1" >/dev/null || fail "needs $1: $2"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd) # in a clone
device=cuda
[ "$(uname)" = Darwin ] && device=metal
arch=native server= source= out=$root/build/llama pack= configure_only=
jobs=$(getconf _NPROCESSORS_ONLN)
while [ $# -gt 0 ]; do
  case $1 in
    --cuda | --vulkan | --metal | --cpu) device=${1#--} ;;
    --server) server=1 ;;
    --configure) configure_only=1 ;;
    --arch | --source | --out | --jobs | --pack)
      [ $# -gt 1 ] || fail "$1 takes a value"
      declare "${1#--}=$2"
      shift
      ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && fail "unknown option $1" ;;
  esac
  shift
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

download() {
  local version
  [ -e "$root/pyproject.toml" ] || fail "give the sources as --source, or run \`rekindle build-gpu\`"
  version=$(sed -n 's/.*"xllamacpp==\([^"]*\)".*/\1/p' "$root/pyproject.toml")
  [ -n "$version" ] || fail "pyproject.toml pins no xllamacpp"
  local python=$root/.venv/bin/python
  [ -x "$python" ] || python=python3
  "$python" -m pip download --quiet --no-deps --no-binary xllamacpp --dest "$work/archive" \
    "xllamacpp==$version" >&2 || fail "pip could not download the sources; give them as --source"
  echo "$work"/archive/xllamacpp-*.tar.gz
}

# Prints the folder with llama.cpp's CMakeLists.txt.
unpack() {
  local given=${source:-$(download)} folder=$work/source found
  [ -e "$given" ] || fail "there is no $given"
  if [ -d "$given" ]; then
    folder=$given
  else
    mkdir -p "$folder"
    tar -xf "$given" -C "$folder" || fail "$given cannot be unpacked"
  fi
  found=$(find "$folder" -maxdepth 5 -path '*/ggml/CMakeLists.txt' -print -quit)
  [ -n "$found" ] || fail "$given holds no llama.cpp"
  (cd "$(dirname "$found")/.." && pwd)
}

# The parts that no build here reads are most of the archive: model files, documents, the web page.
write_pack() {
  local target here=llama.cpp paths
  mkdir -p "$(dirname "$2")"
  target=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
  cd "$work"
  ln -s "$1" "$here"
  shopt -s nullglob
  paths=("$here"/{CMakeLists.txt,LICENSE,licenses,cmake,include,src,common,vendor,ggml}
    "$here"/scripts/{build-info.sh,*.cmake} "$here"/tools/CMakeLists.txt
    "$here"/tools/*/{CMakeLists.txt,*.cpp,*.hpp,*.c,*.h} "$here"/tools/mtmd/*/*.{cpp,h}
    "$here"/tools/ui/*.{in,cmake})
  tar --exclude="$here"/ggml/src/ggml-{opencl,sycl,hexagon,et,openvino,webgpu,cann,virtgpu} \
    -caf "$target" "${paths[@]}"
  echo "wrote $target ($(du -h "$target" | cut -f1)); build with --source $2"
}

# Where the number of rows changes from step to step, an executable CUDA graph that is updated in place
# ends the process with "an illegal instruction was encountered" (seen on an H200 with CUDA 13.0). A new
# one is made instead. That takes as long as it saves in some twenty steps, so a graph is made of
# steps that have been alike sixteen times, not twice.
patch_cuda_graphs() {
  local file=$1/ggml/src/ggml-cuda/ggml-cuda.cu fields=$1/ggml/src/ggml-cuda/common.cuh
  local drop='if (cuda_graph_update_required \&\& graph->instance) {'
  drop+=' CUDA_CHECK(cudaGraphExecDestroy(graph->instance)); graph->instance = nullptr; }'
  local count='graph->calls_alike = properties_changed ? 0 : graph->calls_alike + 1;'
  grep -q 'graph->calls_alike' "$file" && return # before it was packed
  sed -i.orig -e "s|^\( *\)\(if (graph->instance == nullptr) { // Create executable.*\)|\1$drop \2|" \
    -e 's|if (cuda_graph_update_required) { // Update graph executable|if (false) {|' \
    -e "s|\(const bool properties_changed = .*;\)|\1 $count|" \
    -e 's|if (!properties_changed) {|if (graph->calls_alike >= 16) {|' "$file"
  sed -i.orig -e 's|bool warmup_complete = false;|& int calls_alike = 0;|' "$fields"
  { [ "$(diff "$file.orig" "$file" | grep -c '^>')" = 4 ] &&
    [ "$(diff "$fields.orig" "$fields" | grep -c '^>')" = 1 ]; } ||
    fail "$file is not of the pinned version: CUDA graphs could not be patched"
  rm "$file.orig" "$fields.orig"
}

configure() {
  local options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=ON)
  case $device in
    cuda)
      need nvcc "install NVIDIA's CUDA toolkit, or choose --vulkan or --cpu"
      # The driver's own library may be where no linker looks; the loader finds it.
      options+=(-DGGML_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch"
        -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined)
      ;;
    vulkan)
      need glslc "install the Vulkan SDK (Debian: libvulkan-dev glslc)"
      options+=(-DGGML_VULKAN=ON)
      ;;
    metal) options+=(-DGGML_METAL=ON -DGGML_METAL_EMBED_LIBRARY=ON) ;;
    cpu) options+=(-DGGML_CUDA=OFF -DGGML_METAL=OFF) ;;
  esac
  command -v ninja >/dev/null && options+=(-G Ninja)
  cmake -S "$1" -B "$out" "${options[@]}" >&2
}

sources=$(unpack)
if [ -n "$pack" ]; then
  write_pack "$sources" "$pack"
  exit
fi
need cmake "pip install cmake, or take the system's"
mkdir -p "$out"
if [ "$sources" = "$work/source" ] || [[ $sources == "$work"/* ]]; then
  rm -rf "$out/source" # kept next to the build, which refers to it
  mv "$sources" "$out/source"
  sources=$out/source
  [ $device != cuda ] || patch_cuda_graphs "$sources"
elif [ $device = cuda ]; then
  echo "build-llama: $sources is built as it is: docs/gpu.md says what is patched in an archive" >&2
fi
configure "$sources"
[ -z "$configure_only" ] || exit 0
# libmtmd, for pictures, loads libllama and ggml's libraries: one path names them all.
targets=(mtmd)
[ -z "$server" ] || targets+=(llama-server)
cmake --build "$out" --config Release -j "$jobs" --target "${targets[@]}" >&2
library=$(find "$out/bin" -maxdepth 1 \( -name libmtmd.so -o -name libmtmd.dylib \) -print -quit)
[ -n "$library" ] || fail "the build left no library in $out/bin"
[ -z "$server" ] || echo "llama-server: $out/bin/llama-server"
echo "REKINDLE_LLAMA_LIB=$library"
