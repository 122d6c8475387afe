# Leaves in PACKAGE either _native.so or _native_missing.txt, whose first line says why there is no library and whose
# further ones are the compiler's errors. It never fails.
#   cmake -D SOURCE=csrc -D BUILD=DIR -D PACKAGE=DIR [-D GENERATOR=Ninja] [-D MAKE_PROGRAM=PATH] -P build_native.cmake
set(reason_file ${PACKAGE}/_native_missing.txt)
file(REMOVE ${PACKAGE}/_native.so ${reason_file})
file(MAKE_DIRECTORY ${PACKAGE})

# Shows what the command says, and keeps it in `output`.
macro(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE errors
    ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE)
  string(APPEND output "${errors}")
endmacro()

function(give_up reason)
  string(REGEX REPLACE "[][;]" "_" output "${output}")  # which mean something in a list
  string(REGEX MATCHALL "[^\n]*error:[^\n]*" errors "${output}")
  if(errors)
    list(SUBLIST errors 0 5 errors)
    list(JOIN errors "\n" errors)
  endif()
  file(WRITE ${reason_file} "${reason}\n${errors}\n")
  message(WARNING "inferplane-kernels-cpu is installed WITHOUT its native library: ${reason}\n${errors}")
endfunction()

set(options)
if(GENERATOR)
  list(APPEND options -G ${GENERATOR})
endif()
if(MAKE_PROGRAM)
  list(APPEND options -D CMAKE_MAKE_PROGRAM=${MAKE_PROGRAM})
endif()
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${BUILD} ${options})
if(output MATCHES "No CMAKE_CXX_COMPILER could be found")
  give_up("no C++ compiler was found when it was installed")
  return()
elseif(result)
  give_up("the C++ compiler or CMake failed when it was installed")
  return()
endif()
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)  # make asks for a number, and takes one else
run(${CMAKE_COMMAND} --build ${BUILD} --parallel ${cores})
if(result)
  give_up("the C++ compiler failed when it was installed")
  return()
endif()
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${PACKAGE} --strip)
if(result)
  give_up("the built library could not be put in its place")
endif()
