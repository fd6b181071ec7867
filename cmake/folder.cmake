# One folder of C files becomes one static library; every x_test.c in it becomes one CTest test.

add_library(viaduct_options INTERFACE)
target_compile_definitions(viaduct_options INTERFACE _GNU_SOURCE VIADUCT_VERSION="${PROJECT_VERSION}")
target_include_directories(viaduct_options INTERFACE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/runtime)
target_compile_options(viaduct_options INTERFACE
    -Wall -Wextra -Werror -Wshadow -Wvla -Wundef -Wstrict-prototypes -Wmissing-prototypes
    -Wpointer-arith -Wwrite-strings -fno-math-errno -fno-trapping-math)
if(VIADUCT_NATIVE)
    target_compile_options(viaduct_options INTERFACE -march=native)
else()
    target_compile_options(viaduct_options INTERFACE -march=x86-64-v3)
endif()
if(VIADUCT_SANITIZE)
    target_compile_options(viaduct_options INTERFACE
        -fsanitize=${VIADUCT_SANITIZE} -fno-sanitize-recover=all)
    target_link_options(viaduct_options INTERFACE -fsanitize=${VIADUCT_SANITIZE})
endif()
target_link_libraries(viaduct_options INTERFACE Threads::Threads m)

# The libraries of Debian that the folders use, as imported targets PkgConfig::NAME.
foreach(pair
        "grpc:grpc;gpr" "protobuf_c:libprotobuf-c" "uv:libuv"
        "archive:libarchive" "png:libpng" "jpeg:libturbojpeg" "yaml:yaml-0.1"
        "jansson:jansson" "zlib:zlib" "sndfile:sndfile" "kissfft:kissfft-float"
        "cmocka:cmocka")
    string(REPLACE ":" ";" pair "${pair}")
    list(POP_FRONT pair name)
    pkg_check_modules(${name} REQUIRED IMPORTED_TARGET ${pair})
endforeach()
find_library(DNNL_LIBRARY dnnl REQUIRED)

# viaduct_library(<target> [SUBFOLDERS dir...] [LINK library...]): the .c files here, less tests and main.c.
# Tests link the library, cmocka and what TEST_LINK adds, and run with their source folder as working directory.
function(viaduct_library target)
    cmake_parse_arguments(ARG "" "" "SUBFOLDERS;LINK;TEST_LINK" ${ARGN})
    file(GLOB sources CONFIGURE_DEPENDS *.c)
    foreach(folder ${ARG_SUBFOLDERS})
        file(GLOB more CONFIGURE_DEPENDS ${folder}/*.c)
        list(APPEND sources ${more})
    endforeach()
    set(tests ${sources})
    list(FILTER tests INCLUDE REGEX "_test\\.c$")
    list(FILTER sources EXCLUDE REGEX "(_test|/main)\\.c$")
    if(sources)
        add_library(${target} STATIC ${sources})
        target_link_libraries(${target} PUBLIC viaduct_options ${ARG_LINK})
    else()
        add_library(${target} INTERFACE)
        target_link_libraries(${target} INTERFACE viaduct_options ${ARG_LINK})
    endif()
    foreach(source ${tests})
        get_filename_component(name ${source} NAME_WE)
        set(name ${target}_${name})
        add_executable(${name} ${source})
        target_link_libraries(${name} PRIVATE ${target} ${ARG_TEST_LINK} PkgConfig::cmocka)
        add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
        set_tests_properties(${name} PROPERTIES TIMEOUT 300)
    endforeach()
endfunction()
