# SPDX-License-Identifier: Apache-2.0
# Injected with CMAKE_PROJECT_INCLUDE.  The message wheels export the Python
# and NumPy header folders of the machine that built them; CMake refuses an
# imported target whose include folder is missing.  Once the project's own
# CMakeLists.txt has been read, drop every include folder that is not there.
include_guard(GLOBAL)

function(_drop_missing_include_dirs)
  get_property(_targets DIRECTORY PROPERTY IMPORTED_TARGETS)
  foreach(_target IN LISTS _targets)
    get_target_property(_dirs ${_target} INTERFACE_INCLUDE_DIRECTORIES)
    if(NOT _dirs)
      continue()
    endif()
    set(_kept "")
    foreach(_dir IN LISTS _dirs)
      if(_dir MATCHES "^\\$<" OR EXISTS "${_dir}")
        list(APPEND _kept "${_dir}")
      endif()
    endforeach()
    set_target_properties(${_target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_kept}")
  endforeach()
endfunction()

cmake_language(DEFER CALL _drop_missing_include_dirs)
