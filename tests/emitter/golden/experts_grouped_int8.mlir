// castiron emit --kernel experts --shape 2x16x64 --codec q4_1 --tokens 9 --numerics fast --isa avx2 --threads 2
// 1877 lines, sha256 18028ad8b8acc738dff24a92cd8b564fa2dff27f08228ab6a2927dab8815b380
                      %1004:12 = scf.for %991 = %c0 to %c3 step %c4 iter_args(%992 = %979, %993 = %980, %994 = %981, %995 = %982, %996 = %983, %997 = %984, %998 = %985, %999 = %986, %1000 = %987, %1001 = %988, %1002 = %989, %1003 = %990) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                        %1005 = arith.muli %991, %c12 : index
                        %1006 = vector.load %2[%991, %966] : memref<2x16xf32>, vector<8xf32>
                        %1007 = vector.load %3[%991, %966] : memref<2x16xf32>, vector<8xf32>
                        %1008 = vector.load %2[%991, %968] : memref<2x16xf32>, vector<8xf32>
                        %1009 = vector.load %3[%991, %968] : memref<2x16xf32>, vector<8xf32>
                        %1010 = arith.divui %865, %c19 : index
                        %1011 = arith.addi %1010, %991 : index
                        %1012 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1013 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1014 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1015 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1016 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1017 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1018 = vector.load %1[%1005, %966] : memref<16x16xi32>, vector<8xi32>
                        %1019 = vector.load %1[%1005, %968] : memref<16x16xi32>, vector<8xi32>
                        %1020 = vector.bitcast %1018 : vector<8xi32> to vector<32xi8>
                        %1021 = vector.bitcast %1019 : vector<8xi32> to vector<32xi8>
                        %1022 = arith.muli %1011, %c12 : index
                        %1023 = memref.load %m0[%950, %1022] : memref<9x16xi32>
                        %1024 = vector.broadcast %1023 : i32 to vector<8xi32>
                        %1025 = vector.bitcast %1024 : vector<8xi32> to vector<32xi8>
                        %1026 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1020, %1025) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1027 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1021, %1025) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1028 = memref.load %m0[%953, %1022] : memref<9x16xi32>
                        %1029 = vector.broadcast %1028 : i32 to vector<8xi32>
                        %1030 = vector.bitcast %1029 : vector<8xi32> to vector<32xi8>
                        %1031 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1020, %1030) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1032 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1021, %1030) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1033 = memref.load %m0[%956, %1022] : memref<9x16xi32>
                        %1034 = vector.broadcast %1033 : i32 to vector<8xi32>
                        %1035 = vector.bitcast %1034 : vector<8xi32> to vector<32xi8>
                        %1036 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1020, %1035) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1037 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1021, %1035) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1038 = memref.load %m0[%959, %1022] : memref<9x16xi32>
                        %1039 = vector.broadcast %1038 : i32 to vector<8xi32>
                        %1040 = vector.bitcast %1039 : vector<8xi32> to vector<32xi8>
                        %1041 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1020, %1040) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1042 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1021, %1040) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1043 = memref.load %m0[%962, %1022] : memref<9x16xi32>
// 466 lines more
                        %1510 = memref.load %m1[%965, %1011] : memref<9x2xf32>
                        %1511 = vector.broadcast %1510 : f32 to vector<8xf32>
                        %1512 = math.fma %1509, %1511, %1002 : vector<8xf32>
                        %1513 = memref.load %m2[%965, %1011] : memref<9x2xf32>
                        %1514 = vector.broadcast %1513 : f32 to vector<8xf32>
                        %1515 = math.fma %1007, %1514, %1512 : vector<8xf32>
                        %1516 = arith.mulf %1438, %1008 : vector<8xf32>
                        %1517 = memref.load %m1[%965, %1011] : memref<9x2xf32>
                        %1518 = vector.broadcast %1517 : f32 to vector<8xf32>
                        %1519 = math.fma %1516, %1518, %1003 : vector<8xf32>
                        %1520 = memref.load %m2[%965, %1011] : memref<9x2xf32>
                        %1521 = vector.broadcast %1520 : f32 to vector<8xf32>
                        %1522 = math.fma %1009, %1521, %1519 : vector<8xf32>
                        scf.yield %1445, %1452, %1459, %1466, %1473, %1480, %1487, %1494, %1501, %1508, %1515, %1522 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                      }
