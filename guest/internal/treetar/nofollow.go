package treetar

import "golang.org/x/sys/unix"

// openNoFollow keeps a file that was replaced by a link or a pipe from being
// followed or waited for.
const openNoFollow = unix.O_NOFOLLOW | unix.O_NONBLOCK
