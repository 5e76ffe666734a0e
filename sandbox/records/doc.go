// Package records is the index and the history of sandboxes, in a SQLite database beside the files of a store. It knows
// no store and no VM: it is told what there is ([DB.Put], [DB.Keep], [DB.AddRuns]) and asked ([DB.List], [DB.Runs]).
//
// The database is nobody's truth: see docs/adr/0041-records-are-an-index-beside-the-files.md. What is in it can be told
// again by the files, but for the history of what is gone. Several processes may use it at once.
package records
