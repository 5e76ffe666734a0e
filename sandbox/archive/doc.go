// Package archive keeps snapshots and images in a store of objects (sandbox/blob), so that another host can have
// them, or this one after it has lost its disk. docs/FORMAT.md, "Archives", has the format.
//
// A file is cut into frames of 512 KiB. Each is compressed by itself and has its SHA-256 in the file's index; frames
// of zeros are absent. Frames are packed in objects of about 16 MiB. A manifest, put last, names the files with the
// SHA-256 of their indexes: so all that is read is checked against the manifest before it is used.
//
// Every attempt to put a snapshot has keys of its own, and a manifest is put once. So attempts that were cut, or that
// two hosts make at once, leave a whole snapshot or none, and objects that no manifest names, which Sweep removes.
package archive
