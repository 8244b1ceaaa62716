"""The command line: `rollmesh VERB`. Each verb parses its arguments and calls one room."""
