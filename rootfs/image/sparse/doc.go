// Package sparse writes files whose blocks of zeros are holes, and reads files without filling the page cache with the
// zeros of holes.
package sparse
